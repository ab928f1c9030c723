#!/usr/bin/env python3
"""Says what of a preprocessed kernel (standard input) is C++ and not Metal's language, though clang accepts it.

usage: clang++ -E -P ... kernel.metal | tests/metal_host/check_text.py
"""

import re
import sys

SPACES = re.compile(r"\b(device|constant|threadgroup|thread)\b")
WORDS = re.compile(r"\bstd::|\bif constexpr\b|\bdouble\b|\bauto\b[^;]*=\s*\[|\[[&=]\]|\bnew\b|\bdelete\b|\bthrow\b|\btry\b|"
                   r"\bdynamic_cast\b|\btypeid\b|\bvirtual\b|\bgoto\b|\bthread_local\b|\bstatic\b(?!\s+constant\b)")
# As the formatter writes them: T* x, T& x, T (&x)[8]; products and sums of bits have spaces on both sides.
INDIRECT = re.compile(r"[\w>][*&]+(?: const)?(?: \w+)?\s*(?=[,)=;>(\[{])|\([*&]\w+\)\[")


def globals_of(text):
    """Declarations at namespace scope that end with a semicolon."""
    text = re.sub(r"\bnamespace \w+ \{", "", text)
    depth, begin = 0, 0
    for at, c in enumerate(text):
        if c in "{(":
            depth += 1
        elif c in "})":
            depth = max(depth - 1, 0)  # a namespace's end
            head = text[begin:at].split("{")[0]
            if c == "}" and depth == 0 and "=" not in head and not re.search(r"\bstruct\b|\benum\b", head):
                begin = at + 1
        elif c == ";" and depth == 0:
            yield text[begin:at].strip(" \n}")
            begin = at + 1


def faults(text):
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    text = re.sub(r"(?<=\w)<[\w:, ]*>", "", text)  # what templates are of
    for found in WORDS.finditer(text):
        yield f"not a word of Metal: {found.group().strip()}"
    for found in INDIRECT.finditer(text):
        begin = max(text.rfind(c, 0, found.start() + 1) for c in "(,;{}<")
        what = text[begin + 1:found.end()].strip()
        if not SPACES.search(what):
            yield f"a pointer or reference without an address space: {what}"
    for what in globals_of(text):
        if what and not re.match(r"(using|struct|enum|template|typedef|static_assert|constant)\b", what) and not what.endswith(")"):
            yield f"a variable at namespace scope: {what}"


def main():
    text = sys.stdin.read()
    found = list(dict.fromkeys(faults(text)))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
