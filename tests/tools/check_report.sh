#!/usr/bin/env bash
# Makes a report and shows it to chromium, as wide as a desktop and as a phone: the pictures must not be empty, the
# page must not be wider than the window, and the console must stay silent. Exits with 77 where there is no chromium.
# usage: tests/tools/check_report.sh <gyre> [folder to keep the pictures in]
set -euo pipefail

gyre=$1
chromium=$(command -v chromium || command -v chromium-browser || true)
[[ -n $chromium ]] || { echo "skipped: chromium is not installed"; exit 77; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
keep=${2:-$work}
mkdir -p "$keep"

fail() { echo "check_report: $*" >&2; exit 1; }

# browse <name> <width> <height> <address>: a picture in <name>.png, what was logged in <name>.log
browse() {
  timeout 120 "$chromium" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
    --allow-file-access-from-files --user-data-dir="$work/profile" --enable-logging=stderr --v=0 \
    --window-size="$2,$3" --screenshot="$keep/$1.png" "$4" >"$work/$1.log" 2>&1 ||
    { cat "$work/$1.log" >&2; fail "chromium failed on $1"; }
  [[ -s $keep/$1.png ]] || fail "no picture of $1"
  # Width and height are big-endian at byte 16 of every PNG.
  local size
  size=$(od -An -tu1 -j16 -N8 "$keep/$1.png" | awk '{ print $3 * 256 + $4 "x" $7 * 256 + $8 }')
  [[ $size == "$2x$3" ]] || fail "the picture of $1 is $size instead of $2x$3"
}

"$gyre" compare --heads 4 --kv-heads 2 --head-dim 64 --layers 2 --context 64,256,1024 --threads 1 --seconds 0.01 \
  --html "$work/report.html" >"$work/table.txt" 2>"$work/progress.txt" ||
  { cat "$work/progress.txt" >&2; fail "gyre compare failed"; }
grep -q 'tq8/tq4' "$work/table.txt" || fail "the table has no tq8/tq4"

# Chromium itself complains about machines without a desktop; lines with CONSOLE are the page's.
for shape in desktop:1200:1000 phone:390:844; do
  IFS=: read -r name width height <<<"$shape"
  browse "blank-$name" "$width" "$height" about:blank
  browse "$name" "$width" "$height" "file://$work/report.html"
  ! grep CONSOLE "$work/$name.log" >&2 || fail "the console of $name is not silent"
  # One colour packs into next to nothing.
  (($(stat -c %s "$keep/$name.png") > 5 * $(stat -c %s "$keep/blank-$name.png") + 10000)) ||
    fail "the picture of $name is as good as empty"

  # A page around the page asks how wide it would like to be.
  cat >"$work/frame.html" <<FRAME
<!DOCTYPE html><link rel="icon" href="data:,"><body style="margin:0"><iframe id="f" src="report.html"
width="$width" height="$height" style="border:0" onload="
const d = document.getElementById('f').contentDocument;
console.log('wide ' + d.documentElement.scrollWidth + ' figures ' + d.querySelectorAll('svg polyline').length);
"></iframe></body>
FRAME
  browse "frame-$name" "$width" "$height" "file://$work/frame.html"
  said=$(grep -o 'wide [0-9]* figures [0-9]*' "$work/frame-$name.log" | head -n 1 || true)
  read -r _ wide _ figures <<<"$said"
  [[ -n ${wide:-} ]] || { cat "$work/frame-$name.log" >&2; fail "$name did not answer"; }
  ((wide <= width)) || fail "the page is $wide wide in a window of $width"
  ((figures == 6)) || fail "$figures lines in the chart instead of 6"
  echo "$name: ${width}x$height, $(stat -c %s "$keep/$name.png") bytes, $said"
done
