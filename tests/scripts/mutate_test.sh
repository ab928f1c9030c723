#!/usr/bin/env bash
# scripts/mutate.py restores the file and ends what it started, whatever ends it; and says what a test caught.
# usage: mutate_test.sh <scripts/mutate.py>
set -euo pipefail
folder=$(mktemp -d)
# A build that the script did not end is ended by its number.
trap '[[ ! -s $folder/child ]] || kill "$(cat "$folder/child")" 2>/dev/null || true; rm -rf "$folder"' EXIT
mkdir -p "$folder"/{scripts,tests,bin,build/release/tests}
cp "$1" "$folder/scripts/mutate.py"
cd "$folder"
printf 'return 1;\n' > code.cpp
cat > tests/mutations.json << 'END'
[{"target": "code_test", "mutations": [{"file": "code.cpp", "old": "return 1;", "new": "return 2;", "why": "a number"}]}]
END

fail() { echo "$*"; exit 1; }
restored() { [[ $(cat code.cpp) == 'return 1;' ]]; }
# Waits up to 10 s for a condition.
wait_for() {
  for _ in $(seq 200); do
    if "$@"; then return 0; fi
    sleep 0.05
  done
  return 1
}
ended() { ! kill -0 "$1" 2>/dev/null; }

# A build that never ends where the file is mutated, with a child as compilers are of ninja.
test_that() { printf '#!/bin/sh\n%s\n' "$1" > build/release/tests/code_test; chmod +x build/release/tests/code_test; }
test_that 'exit 0'
cat > bin/cmake << 'END'
#!/usr/bin/env bash
grep -q 'return 1;' code.cpp && exit
sleep 1000 &
echo $! > child
wait
END
chmod +x bin/cmake
for signal in TERM INT HUP; do
  rm -f child
  # A shell's background jobs ignore SIGINT, and a script inherits that: it must catch it all the same.
  PATH=$folder/bin:$PATH python3 scripts/mutate.py > out 2>&1 &
  mutate=$!
  wait_for test -s child || fail "$signal: the build did not start: $(cat out)"
  restored && fail "$signal: the file was not mutated"
  kill -s $signal $mutate
  code=0
  wait $mutate || code=$?
  [[ $code == $((128 + $(kill -l $signal))) ]] || fail "$signal: exit $code: $(cat out)"
  restored || fail "$signal: the file is still mutated"
  wait_for ended "$(cat child)" || fail "$signal: the build goes on"
done

# The test decides: the name of a result, what the test does where the file is mutated, and where it is not.
printf '#!/bin/sh\n' > bin/cmake
says() {
  test_that "if grep -q 'return 2;' code.cpp; then $2; else $3; fi"
  local code=0
  PATH=$folder/bin:$PATH python3 scripts/mutate.py --timeout 1 > out 2>&1 || code=$?
  [[ $code == "$4" ]] || fail "$1: exit $code: $(cat out)"
  restored || fail "$1: the file is still mutated"
  grep -q "$1" out || fail "$1: $(cat out)"
}
says '^1 caught' 'exit 1' 'exit 0' 0
says '^1 survived' 'exit 0' 'exit 0' 1
says '^1 timed out' 'exec sleep 1000' 'exit 0' 1
says 'without a mutation: fails: .*code_test' 'exit 1' 'exit 1' 1
grep -q ' caught' out && fail "a test that fails anyway: $(cat out)"
says 'without a mutation: timed out: .*code_test' 'exit 1' 'exec sleep 1000' 1
