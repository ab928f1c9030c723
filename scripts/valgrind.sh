#!/usr/bin/env bash
# Memcheck over the parts where it is quick enough: recording, caches, pools, files, the C ABI, random calls. It finds what
# the address sanitizer does not look for: numbers that depend on memory nobody wrote. Builds the programs first.
# usage: scripts/valgrind.sh BUILD
set -uo pipefail
build=$1
programs=(encoder_test tensor_test tensor_host_test hazard_test custom_kernel_test graph_test kv_protocol_test kv_dropped_test
  kv_rollback_test kv_snapshot_test kv_pool_test kv_batch_test pool_files_test c_ops_test c_kv_test api_fuzz_test)
cmake --build "$build" --target "${programs[@]}" || exit 1

logs=$build/valgrind
rm -rf "$logs"
mkdir -p "$logs"
check() {  # check PROGRAM: its output, and on the last line whether it passed
  local program=$1 path=$build/tests/$1 options=(--gtest_brief=1) begin=$SECONDS status
  [[ $program != api_fuzz_test ]] || path=$build/tests/stress/$program options=(--calls 5000 --memory-gib 0)
  valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite --fair-sched=yes \
    "$path" "${options[@]}" >"$logs/$program" 2>&1
  status=$?
  cat "$logs/$program"
  echo "== $program: status $status, $((SECONDS - begin)) s"
  [[ $status == 0 ]] || touch "$logs/$program.failed"
}
export -f check
export build logs
printf '%s\n' "${programs[@]}" | xargs -P "$(nproc)" -I {} bash -c 'check {}'

failed=$(find "$logs" -name '*.failed' -exec basename {} .failed \; | sort | tr '\n' ' ')
echo "valgrind: ${#programs[@]} programs, failed: ${failed:-none}"
[[ -z $failed ]]
