#!/usr/bin/env python3
"""Looks for products of warpgroups (wgmma) that may read registers of A after something else was written there.

ptxas 13.0 gives such registers to loads that come before the wait for the products if nothing reads them after it; then sums
are wrong now and then. The code keeps them alive by hand (ggml-like/cuda/ptx/wgmma.cuh, hold), and this looks at what
came out.

  scripts/check_wgmma.py FILE...    a program, object file or cubin with code for sm_90a

Needs cuobjdump (CUDA toolkit). Exit 0: nothing found; 1: found, each with its kernel and instruction; 77: no cuobjdump.
"""
import re
import shutil
import subprocess
import sys

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
DESTINATION = re.compile(r"(\S+)\s+R(\d+)\b")
WRITES_NO_REGISTER = re.compile(r"ST|SYNCS|BAR|RED|UT|BRA|R2UR|BS|ISETP|FSETP|HSETP|LDGSTS|P2UR|WARP")


def width(operation):
    """Registers that an instruction writes."""
    if ".128" in operation:
        return 4
    return 2 if re.search(r"\.64|WIDE|CS2R|F2F\.F64", operation) else 1


def look_at(lines):
    """Yields (kernel, products, findings)."""
    kernel, products, findings, groups = None, 0, [], [set()]  # registers of A; the last group has no end yet
    for line in lines:
        if begin := re.search(r"Function : (\S+)", line):
            if products:
                yield kernel, products, findings
            kernel, products, findings, groups = begin[1], 0, [], [set()]
            continue
        found = INSTRUCTION.match(line)
        if not found:
            continue
        place, text = found[1], found[2]
        if text.startswith("HGMMA"):
            products += 1
            operand = text.split(",")[1].strip()
            if a := re.match(r"R(\d+)", operand):
                groups[-1] |= set(range(int(a[1]), int(a[1]) + 4))
            if "gsb0" in text:
                groups.append(set())
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text):
            running = int(wait[1], 16)
            groups = groups[len(groups) - 1 - running if running < len(groups) else 0 :]
        elif (to := DESTINATION.match(text)) and not WRITES_NO_REGISTER.match(to[1]):
            first = int(to[2])
            if set().union(*groups) & set(range(first, first + width(to[1]))):
                findings.append(f"{place}: {text}")
    if products:
        yield kernel, products, findings


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if shutil.which("cuobjdump") is None:
        print("check-wgmma: not looked at: there is no cuobjdump (CUDA toolkit)")
        sys.exit(77)
    kernels = products = 0
    bad = []
    for file in sys.argv[1:]:
        with subprocess.Popen(["cuobjdump", "--dump-sass", file], stdout=subprocess.PIPE, text=True) as dump:
            for kernel, count, findings in look_at(dump.stdout):
                kernels, products = kernels + 1, products + count
                bad += [(kernel, finding) for finding in findings]
        if dump.returncode != 0:
            sys.exit(f"check-wgmma: cuobjdump cannot read {file}")
    for kernel, finding in bad:
        print(f"  {kernel}\n    {finding}")
    print(f"check-wgmma: {kernels} kernels with {products} products of warpgroups, {len(bad)} writes to their registers")
    if products == 0:
        sys.exit("check-wgmma: no product of warpgroups found: built for sm_90a?")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
