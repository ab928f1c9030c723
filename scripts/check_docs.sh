#!/usr/bin/env bash
# Documents may only link to files and headings that exist and name tests that exist; the README's chart shows docs/benchmarks.md's
# figures.
set -euo pipefail
cd "$(dirname "$0")/.."

# The anchors that GitHub makes of a page's headings.
anchors() {
  sed '/^```/,/^```/d' "$1" | sed -nE 's/^#+ +//p' | sed -E 's/\]\([^)]*\)//g; s/[^[:alnum:] _-]//g; s/ /-/g' | tr '[:upper:]' '[:lower:]'
}

status=0
for document in *.md docs/*.md docs/notes/*.md tests/*.md; do
  [[ -e $document ]] || continue
  while read -r link; do
    [[ -e $(dirname "$document")/$link ]] || { echo "$document: no such file: $link"; status=1; }
  done < <(grep -oP '\]\(\K(?!https?:)[^)#]+' "$document" || true)
  while IFS='#' read -r file anchor; do
    page=$([[ -n $file ]] && echo "$(dirname "$document")/$file" || echo "$document")
    [[ $page != *.md || ! -e $page ]] && continue
    anchors "$page" | grep -qxF -- "$anchor" || { echo "$document: no such heading: $file#$anchor"; status=1; }
  done < <(grep -oP '\]\(\K(?!https?:)[^)#]*#[^)]+' "$document" || true)
done
while IFS=. read -r suite name; do
  grep -qE "^TEST(_F|_P)?\($suite, $name\)" tests/*.cpp tests/*/*.cpp ||
    { echo "docs/parity.md: no such test: $suite.$name"; status=1; }
done < <(grep -oP '`\K[A-Z]\w+\.[A-Z]\w+(?=`)' docs/parity.md | sort -u)
if command -v python3 > /dev/null; then
  scripts/readme_chart.py /dev/stdout | cmp - docs/decode.svg || { echo "docs/decode.svg: run scripts/readme_chart.py"; status=1; }
fi
exit "$status"
