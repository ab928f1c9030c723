#!/usr/bin/env bash
# Memcheck over the parts where it is quick enough: recording, caches, pools, files, the C ABI, random calls. It finds what
# the address sanitizer does not look for: numbers that depend on memory nobody wrote.
# usage: scripts/valgrind.sh BUILD
set -uo pipefail
tests=$1/tests
failed=()
check() {  # check PROGRAM ARGUMENTS...
  echo "== $*"
  valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite --fair-sched=yes "$@" || failed+=("$1")
}
for name in encoder_test tensor_test tensor_host_test hazard_test custom_kernel_test graph_test kv_protocol_test kv_dropped_test \
  kv_rollback_test kv_snapshot_test kv_pool_test kv_batch_test pool_files_test c_ops_test c_kv_test; do
  check "$tests/$name" --gtest_brief=1
done
check "$tests/stress/api_fuzz_test" --calls 5000 --memory-gib 0
echo "valgrind: ${#failed[@]} programs failed ${failed[*]}"
[[ ${#failed[@]} == 0 ]]
