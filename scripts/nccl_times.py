#!/usr/bin/env python3
"""Times of NCCL's all_reduce on two GPUs, to compare with those that `quern -tp 2 -v` prints: 8 KB and 8 MB of FP32, by
peer access and through host memory (NCCL_P2P_DISABLE). Needs torch with CUDA.

    python3 scripts/nccl_times.py
"""
import os
import subprocess
import sys
import time


def rank(number: int, ranks: int) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(number)
    dist.init_process_group("nccl", rank=number, world_size=ranks)
    for count in (2048, 2097152):
        x = torch.zeros(count, device="cuda")
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                dist.all_reduce(x)
        torch.cuda.synchronize()
        times = 100
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(times):
                dist.all_reduce(x)
        best = 1e9
        for _ in range(5):
            torch.cuda.synchronize()
            dist.barrier()
            begun = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begun)
        if number == 0:
            print(f"  {4 * count:>8} bytes: {1e6 * best / times:7.1f} us", flush=True)
    dist.destroy_process_group()


def main() -> int:
    if len(sys.argv) == 3:
        rank(int(sys.argv[1]), int(sys.argv[2]))
        return 0
    for off in ("0", "1"):
        print("NCCL,", "through host memory" if off == "1" else "peer access", flush=True)
        env = {**os.environ, "NCCL_P2P_DISABLE": off, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        children = [subprocess.Popen([sys.executable, __file__, str(r), "2"], env=env) for r in range(2)]
        if any([child.wait() for child in children]):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
