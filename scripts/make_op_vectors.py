#!/usr/bin/env python3
"""Makes tests/vectors/ops: inputs and float32 outputs of transformers' own Qwen3_5Moe pieces, on tiny shapes.

    python3 scripts/make_op_vectors.py        # a few seconds; needs torch, transformers (5.17.0), safetensors, numpy

Each file holds one piece; T tokens first, heads before width, names as in the formulas. Before writing, every output is
compared with a plain float64 computation of the published formula, so a file can only hold what both agree on.

  gated_delta_net    q,k [T,nk,dk] v [T,nv,dv] a,b [T,nv] A_log,dt_bias [nv] state_in [nv,dk,dv]
                     -> g, beta, out, state_out
  gated_delta_unit   the same, 1 head of 2x2, 3 tokens: out and the state after each token (states [3,2,2])
  conv_silu          u [T,C] weight [C,4] history [3,C] -> out, history_out (last 3 rows of u)
  gated_rms_norm     o,z [T,n,d] weight [d] -> out
  moe_route          h [T,D] weight [E,D] -> logits, experts I32 [T,K], weights [T,K]
  attention          x [T,D], q/k/v/o_proj, q/k_norm, positions I32 [T], rope_theta, rotary_dims
                     -> q,k after rope, gated (before o_proj), out
"""

import pathlib

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "vectors" / "ops"
RNG = np.random.default_rng(20)


def random(*shape, scale=1.0, shift=0.0):
    return torch.from_numpy((RNG.standard_normal(shape) * scale + shift).astype(np.float32))


def save(name, limit=2e-6, checks=(), **tensors):
    """checks: pairs (float32 result, float64 value by formula)."""
    for got, want in checks:
        error = float((got.double() - want).norm() / want.norm())
        if error > limit:
            raise SystemExit(f"{name}: transformers and the formula differ by {error:.2e}")
    OUT.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(OUT / f"{name}.safetensors"))


def delta_by_formula(q, k, v, a, b, a_log, dt_bias, state):
    """One token after the other in float64; returns out [T,nv,dv] and the state after each token."""
    q, k, v, a, b, a_log, dt_bias, s = (t.double() for t in (q, k, v, a, b, a_log, dt_bias, state))
    ratio = v.shape[1] // k.shape[1]
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / q.shape[-1] ** 0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    g = -a_log.exp() * torch.log1p((a + dt_bias).exp())
    out, states = [], []
    for t in range(v.shape[0]):
        qt, kt = q[t].repeat_interleave(ratio, 0), k[t].repeat_interleave(ratio, 0)
        s = s * g[t].exp()[:, None, None]
        delta = b[t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, kt))
        s = s + kt[:, :, None] * delta[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", s, qt))
        states.append(s)
    return torch.stack(out), torch.stack(states)


def delta_by_transformers(rule, q, k, v, a, b, a_log, dt_bias, state):
    ratio = v.shape[1] // k.shape[1]
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    beta = b.sigmoid()
    out, last = rule(q.repeat_interleave(ratio, 1)[None], k.repeat_interleave(ratio, 1)[None], v[None], g=g[None],
                     beta=beta[None], initial_state=state[None], output_final_state=True, use_qk_l2norm_in_kernel=True)
    return g, beta, out[0], last[0]


def gated_delta_net():
    length, nk, nv, dk, dv = 70, 2, 4, 16, 8  # more than one chunk of 64
    args = (random(length, nk, dk), random(length, nk, dk), random(length, nv, dv), random(length, nv),
            random(length, nv), random(nv, scale=0.7), random(nv, shift=-2.0), random(nv, dk, dv, scale=0.3))
    g, beta, out, last = delta_by_transformers(hf.torch_recurrent_gated_delta_rule, *args)
    _, _, chunked, chunked_last = delta_by_transformers(hf.torch_chunk_gated_delta_rule, *args)
    want, states = delta_by_formula(*args)
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state_in")
    save("gated_delta_net", checks=((out, want), (last, states[-1]), (chunked, want), (chunked_last, states[-1])),
         **dict(zip(names, args)), g=g, beta=beta, out=out, state_out=last)


def gated_delta_unit():
    def column(*rows):
        return torch.tensor(rows, dtype=torch.float32)[:, None]

    args = (column([3, 4], [-1, 2], [0.5, 0.5]), column([1, 2], [2, -1], [1, 1]),
            column([0.5, -1], [1.5, 0.25], [-2, 3]), column(0.3, -1.2, 2.0), column(0.7, -0.4, 1.5),
            torch.tensor([0.5]), torch.tensor([-0.25]), torch.zeros(1, 2, 2))
    g, beta, out, last = delta_by_transformers(hf.torch_recurrent_gated_delta_rule, *args)
    want, states = delta_by_formula(*args)
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state_in")
    save("gated_delta_unit", checks=((out, want), (last, states[-1])), **dict(zip(names, args)), g=g, beta=beta,
         out=out, states=states[:, 0].float())
    return out, states


def conv_silu():
    length, channels = 9, 12
    u, weight, history = random(length, channels), random(channels, 4, scale=0.5), random(3, channels)
    rows = torch.cat((history, u))
    out = hf.causal_conv1d_fn(rows.T[None], weight, None, activation="silu")[0].T[3:]
    y = sum(weight[:, j].double() * rows[j:j + length].double() for j in range(4))
    save("conv_silu", checks=((out, y * y.sigmoid()),), u=u, weight=weight, history=history, out=out,
         history_out=rows[-3:])


def gated_rms_norm():
    o, z, weight = random(5, 4, 16), random(5, 4, 16, scale=2.0), random(16, scale=0.1, shift=1.0)
    module = hf.Qwen3_5MoeRMSNormGated(16, eps=1e-6)
    module.weight.data = weight
    d, zd = o.double(), z.double()
    want = d / (d.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() * zd * zd.sigmoid()
    out = module(o, z).detach()
    save("gated_rms_norm", checks=((out, want),), o=o, z=z, weight=weight, out=out)


def moe_route():
    config = Qwen3_5MoeTextConfig(hidden_size=24, num_experts=16, num_experts_per_tok=4)
    router = hf.Qwen3_5MoeTopKRouter(config)
    router.weight.data = random(16, 24, scale=0.4)
    h = random(33, 24)
    logits, weights, experts = (t.detach() for t in router(h))
    probability = (h.double() @ router.weight.data.double().T).softmax(-1)
    best = probability.sort(-1, descending=True)
    assert torch.equal(best.indices[:, :4], experts)
    top = best.values[:, :4]
    save("moe_route", checks=((weights, top / top.sum(-1, keepdim=True)),), h=h, weight=router.weight.data,
         logits=logits, weights=weights, experts=experts.to(torch.int32))


def attention():
    length, hidden, heads, kv, dim, rotary, theta, first = 11, 24, 4, 2, 16, 8, 1e4, 3
    config = Qwen3_5MoeTextConfig(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, head_dim=dim, num_hidden_layers=1,
        layer_types=["full_attention"], rope_parameters={"rope_type": "default", "rope_theta": theta,
                                                         "partial_rotary_factor": rotary / dim})
    config._attn_implementation = "eager"
    module = hf.Qwen3_5MoeAttention(config, 0).eval()
    weights = {n: random(*p.shape, scale=0.1 if "norm" in n else p.shape[-1] ** -0.5)
               for n, p in module.named_parameters()}
    module.load_state_dict(weights)
    x, positions = random(length, hidden), torch.arange(first, first + length)
    rope = hf.Qwen3_5MoeTextRotaryEmbedding(config=config)(x[None], positions.expand(3, 1, -1))
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    seen = {}
    module.o_proj.register_forward_hook(lambda _m, inputs, _o: seen.update(gated=inputs[0][0]))
    with torch.no_grad():
        out = module(x[None], rope, mask)[0][0]
    w = {n: t.double() for n, t in weights.items()}

    def normed(rows, weight):
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)

    def rotated(rows):
        angle = positions.double()[:, None, None] * theta ** (-torch.arange(rotary // 2).double() * 2 / rotary)
        lo, hi = rows[..., :rotary // 2], rows[..., rotary // 2:rotary]
        return torch.cat((lo * angle.cos() - hi * angle.sin(), hi * angle.cos() + lo * angle.sin(),
                          rows[..., rotary:]), -1)

    both = (x.double() @ w["q_proj.weight"].T).view(length, heads, 2, dim)
    q = rotated(normed(both[:, :, 0], w["q_norm.weight"]))
    k = rotated(normed((x.double() @ w["k_proj.weight"].T).view(length, kv, dim), w["k_norm.weight"]))
    v = (x.double() @ w["v_proj.weight"].T).view(length, kv, dim).repeat_interleave(heads // kv, 1)
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(heads // kv, 1)) / dim**0.5 + mask[0].double()
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v) * both[:, :, 1].sigmoid()
    want = mixed.reshape(length, -1)
    save("attention", checks=((seen["gated"], want), (out, want @ w["o_proj.weight"].T)), x=x, **weights,
         positions=positions.to(torch.int32), rope_theta=torch.tensor([theta]),
         rotary_dims=torch.tensor([rotary], dtype=torch.int32), q=q.float(), k=k.float(), gated=seen["gated"], out=out)


def main():
    torch.set_num_threads(1)
    gated_delta_net()
    out, states = gated_delta_unit()
    print("unit vector: out", [[round(float(n), 7) for n in row[0]] for row in out],
          "state", [[round(float(n), 7) for n in s.flatten()] for s in states[-1]])
    conv_silu()
    gated_rms_norm()
    moe_route()
    attention()
    print("wrote", ", ".join(sorted(p.name for p in OUT.iterdir())))


if __name__ == "__main__":
    main()
