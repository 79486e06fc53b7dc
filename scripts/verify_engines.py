#!/usr/bin/env python3
"""Loads a checkpoint that `quern quantize-inspect --write` made with the loader of vLLM or SGLang, without a GPU.

    scripts/verify_engines.py vllm DIR      (written for vllm 0.32)
    scripts/verify_engines.py sglang DIR    (written for sglang 0.5.23)

Builds the engine's own model on the CPU as for an H200 (Blackwell where it insists), reads the weights with the engine's
loader, and checks that

  - the engine takes config.json and finds a quantization method for every module,
  - it finds a place for every tensor, and a tensor for every parameter (scales of activations and of the KV cache aside,
    where the file has none and the method needs none; vision and a tied head, where the file has none),
  - matrices that the engine fuses under one global scale have the same.

Nothing is computed: that needs their kernels, and a GPU. Where there is no driver, a libcuda.so.1 must be found all the
same: the toolkit's stub (lib64/stubs/libcuda.so) under that name, in LD_LIBRARY_PATH. Exit code 0: all is well.
"""
import argparse
import logging
import os
import sys
import types
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

PORT = 29500 + os.getpid() % 1000
UNPLACED = "not found in params_dict"
GLOBAL = ("weight_global_scale", "weight_scale_2")  # of NVFP4


class Nothing:
    """For streams and events, which only a driver can make."""

    def __init__(self, *_, **__):
        pass


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def without_gpu():
    import torch
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.set_default_dtype(torch.bfloat16)


def load_vllm(directory):
    """(model, names of the parameters that were loaded)"""
    import torch
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Platform(CudaPlatformBase):
        device_type, dispatch_key = "cpu", "CPU"
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "H200")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 143 << 30)
        is_fully_connected = classmethod(lambda cls, ids: True)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        log_warnings = classmethod(lambda cls: None)
        set_device = classmethod(lambda cls, device: None)

        @classmethod
        def has_device_capability(cls, capability, device_id=0):
            return 90 >= (capability[0] * 10 + capability[1] if isinstance(capability, tuple) else capability)

    platforms._current_platform = platforms.current_platform = Platform()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    registry._run_in_subprocess = lambda function: function()  # the other process would not have this platform

    config = EngineArgs(model=directory, dtype="bfloat16", enforce_eager=True, max_model_len=1024,
                        load_format="safetensors").create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{PORT}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(config)
        loader = DefaultModelLoader(config.load_config)
        return model, model.load_weights(loader.get_all_weights(config.model_config, model))


def load_sglang(directory):
    import torch
    operations = types.ModuleType("vllm._custom_ops")
    operations.rotary_embedding = None
    sys.modules["vllm"], sys.modules["vllm._custom_ops"] = types.ModuleType("vllm"), operations
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        multi_processor_count=132, total_memory=143 << 30, major=9, minor=0, name="H200")
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.quantization import modelopt_quant
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import ServerArgs

    platform = modelopt_quant.get_platform

    class Blackwell:
        is_blackwell = True

        def __getattr__(self, name):
            return getattr(platform(), name)

    modelopt_quant.get_platform = Blackwell
    arguments = ServerArgs(model_path=directory, device="cpu", disable_radix_cache=True, load_format="safetensors",
                           attention_backend="torch_native", moe_runner_backend="marlin", mem_fraction_static=0.5)
    runtime_context.publish(arguments, role="scheduler",
                            ranks=runtime_context.SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    init_distributed_environment(world_size=1, rank=0, distributed_init_method=f"tcp://127.0.0.1:{PORT}",
                                 local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)
    config, load_config = ModelConfig.from_server_args(arguments), LoadConfig(load_format="safetensors")
    torch.set_default_dtype(torch.bfloat16)
    model = loader._initialize_model(config, load_config, loader._get_quantization_config(config, load_config))
    weights = loader.DefaultModelLoader(load_config)._get_all_weights(config, model)
    return model, model.load_weights(weights)


def stored_names(directory):
    from safetensors import safe_open
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as f:
            yield from f.keys()


def is_needed(parameter, parameters, stored):
    """Whether a parameter that was not loaded should have been. Weight-only NVFP4 makes room for activation scales in
    some places, and ignores it."""
    if parameter.startswith("visual.") and not any("visual." in name for name in stored):
        return False
    if "lm_head." in parameter and not any("lm_head." in name for name in stored):
        return False
    module, _, last = parameter.rpartition(".")
    if last.startswith(("k_", "v_", "q_", "prob_")) or last.endswith("_swizzled"):
        return False
    if "input_" not in last or any(name.endswith((".input_scale", ".input_global_scale")) for name in stored):
        return True
    return not any(p.startswith(module + ".") and p.endswith(GLOBAL) for p in parameters)


def different_scales(model, loaded):
    """Fused parameters whose parts have more than one global scale."""
    for name, value in model.named_parameters():
        if name not in loaded or not name.endswith(GLOBAL) or value.dim() == 0:
            continue
        if ".experts." in name and value.dim() == 1:
            continue  # one for each expert
        rows = value if value.dim() == 2 else value.reshape(1, -1)
        if not bool((rows == rows[:, :1]).all()):
            yield name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("directory")
    arguments = parser.parse_args()
    without_gpu()
    heard = Warnings()
    logging.getLogger().addHandler(heard)
    model, loaded = {"vllm": load_vllm, "sglang": load_sglang}[arguments.engine](arguments.directory)
    stored = set(stored_names(arguments.directory))
    parameters = {name for name, _ in model.named_parameters()}
    problems = [f"{name}: no tensor was loaded" for name in sorted(parameters - loaded) if is_needed(name, parameters, stored)]
    problems += [m for m in heard.messages if UNPLACED in m]
    problems += [f"{name}: one scale is used, the parts have several" for name in different_scales(model, loaded)]
    for problem in problems[:20]:
        print(problem)
    print(f"{arguments.engine} {arguments.directory}: {len(stored)} tensors, {len(parameters & loaded)} of "
          f"{len(parameters)} parameters loaded, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
