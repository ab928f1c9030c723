#!/usr/bin/env bash
# Documents may only link to files that exist and name tests that exist; the README's chart shows docs/benchmarks.md's figures.
set -euo pipefail
cd "$(dirname "$0")/.."

status=0
for document in *.md docs/*.md docs/notes/*.md tests/*.md; do
  [[ -e $document ]] || continue
  while read -r link; do
    [[ -e $(dirname "$document")/$link ]] || { echo "$document: no such file: $link"; status=1; }
  done < <(grep -oP '\]\(\K(?!https?:)[^)#]+' "$document" || true)
done
while IFS=. read -r suite name; do
  grep -qE "^TEST(_F|_P)?\($suite, $name\)" tests/*.cpp tests/*/*.cpp ||
    { echo "docs/parity.md: no such test: $suite.$name"; status=1; }
done < <(grep -oP '`\K[A-Z]\w+\.[A-Z]\w+(?=`)' docs/parity.md | sort -u)
if command -v python3 > /dev/null; then
  scripts/readme_chart.py /dev/stdout | cmp - docs/decode.svg || { echo "docs/decode.svg: run scripts/readme_chart.py"; status=1; }
fi
exit "$status"
