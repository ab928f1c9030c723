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
[{"file": "code.cpp", "old": "return 1;", "new": "return 2;", "target": "code_test", "why": "a number"}]
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

# A build that never ends, with a child as compilers are of ninja.
cat > bin/cmake << 'END'
#!/usr/bin/env bash
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

# The test decides.
printf '#!/bin/sh\n' > bin/cmake
for code in 0 1; do
  printf '#!/bin/sh\nexit %s\n' $code > build/release/tests/code_test
  chmod +x build/release/tests/code_test
  result=0
  PATH=$folder/bin:$PATH python3 scripts/mutate.py > out 2>&1 || result=$?
  [[ $result == $((1 - code)) ]] || fail "a test that exits with $code: exit $result: $(cat out)"
  restored || fail "the file is still mutated"
done
grep -q '^1 caught' out || fail "$(cat out)"
