#!/usr/bin/env python3
"""Says which kernels of two programs differ: what a change touched, and whether what was measured is what is shipped.

  scripts/compare_kernels.py OLD NEW    programs or object files, with the same architectures

Prints each kernel whose machine code differs, or that only one of them has, with registers and bytes of stack of a thread before
and after. Needs cuobjdump (CUDA toolkit); with c++filt names can be read. Exit 0: all are the same; 1: some differ; 77: no
cuobjdump.
"""
import hashlib
import re
import shutil
import subprocess
import sys

# What the compiler calls a file's unnamed namespace: hashes in it follow from where the file lies.
OF_FILE = re.compile(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8}")


def plain(name):
    return OF_FILE.sub(lambda m: f"{len(m[1])}{m[1]}", name)


def lines_of(option, path):
    done = subprocess.run(["cuobjdump", option, path], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"compare-kernels: cuobjdump cannot read {path}")
    return done.stdout.splitlines()


def kernels_of(path):
    """{name: (hash of its machine code, registers, stack)}; of several architectures all count."""
    code, use, name = {}, {}, None
    for line in lines_of("--dump-sass", path):
        if begin := re.search(r"Function : (\S+)", line):
            name = plain(begin[1])
            code.setdefault(name, hashlib.sha256())
        elif name:
            code[name].update(line.encode())
    for line in lines_of("--dump-resource-usage", path):
        if begin := re.search(r"Function (\S+):", line):
            name = plain(begin[1])
        elif found := re.search(r"REG:(\d+) STACK:(\d+)", line):
            use[name] = found.groups()
    return {name: (code[name].hexdigest(), *use.get(name, ("?", "?"))) for name in code}


def readable(names):
    """By name, without arguments."""
    if not names or not shutil.which("c++filt"):
        return {name: name for name in names}
    text = subprocess.run(["c++filt", "--no-params"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return {name: line.removeprefix("void ") for name, line in zip(names, text.splitlines())}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if not shutil.which("cuobjdump"):
        print("compare-kernels: not compared: there is no cuobjdump (CUDA toolkit)")
        sys.exit(77)
    old, new = kernels_of(sys.argv[1]), kernels_of(sys.argv[2])
    differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    names = readable(differing)
    for name in differing:
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            print(f"only in {'NEW' if was is None else 'OLD'}: {names[name]}")
        else:
            print(f"{names[name]}: registers {was[1]} -> {now[1]}, stack {was[2]} -> {now[2]}")
    print(f"compare-kernels: {len(differing)} of {len(old.keys() | new.keys())} kernels differ")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
