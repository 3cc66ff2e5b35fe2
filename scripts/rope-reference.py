#!/usr/bin/env python3
"""Computes rotary frequencies and attention factors for tests/test_rope.c, from the papers and not from ling:

    scripts/rope-reference.py >tests/fixtures/rope.json

linear (Chen et al. 2023, arXiv:2306.15595): position t becomes t / s. dynamic (NTK-aware interpolation, with the scale
that a sequence needs): the base b becomes b (s l / L - (s - 1))^(d / (d - 2)). YaRN (Peng et al. 2023,
arXiv:2309.00071): dimension i keeps its frequency where it turns more than beta_fast times over the original length L,
has it divided by s where it turns less than beta_slow times, and is between both, linear in i, elsewhere; the ends are
whole dimensions, outward, unless truncate is false. Its attention factor is the root of 1/t: 0.1 ln s + 1. With
mscale and mscale_all_dim it is the quotient of two such numbers. Where only a part of each head turns, as in Ling 2.0
(partial_rotary_factor), d is the size of that part. All in 50 digits; the dimension that turns n times is
found by bisection of L / wavelength(x) = n.
"""
import json
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal as D, getcontext

getcontext().prec = 50
PI = D("3.14159265358979323846264338327950288419716939937510582")


def power(b, x):
    return (D(b).ln() * x).exp()


def rotations(x, length, theta, d):
    wavelength = 2 * PI * power(theta, 2 * x / D(d))
    return length / wavelength


def dimension(turns, length, theta, d):
    low, high = D(-100 * d), D(100 * d)  # rotations fall with x
    for _ in range(220):
        middle = (low + high) / 2
        if rotations(middle, length, theta, d) > turns:
            low = middle
        else:
            high = middle
    return low


def frequencies(case):
    d = int(case["head_dim"] * case.get("partial_rotary_factor", 1))
    theta, length = D(case["rope_theta"]), case["max_position_embeddings"]
    s = case["rope_scaling"]
    kind, factor = s["rope_type"], D(str(s.get("factor", 0)))
    original = s.get("original_max_position_embeddings", length)
    if not factor:
        factor = D(length) / original
    plain = [power(theta, -2 * D(i) / d) for i in range(d // 2)]
    if kind == "linear":
        return [x / factor for x in plain], D(1)
    if kind == "dynamic":
        used = max(case["length"], length)
        base = theta * power(factor * used / length - (factor - 1), D(d) / (d - 2))
        return [power(base, -2 * D(i) / d) for i in range(d // 2)], D(1)
    first = dimension(D(str(s.get("beta_fast", 32))), original, theta, d)
    last = dimension(D(str(s.get("beta_slow", 1))), original, theta, d)
    if s.get("truncate", True):
        first, last = first.to_integral_value(ROUND_FLOOR), last.to_integral_value(ROUND_CEILING)
    first, last = max(first, D(0)), min(last, D(d - 1))
    if first == last:
        last += D("0.001")
    out = []
    for i, x in enumerate(plain):
        share = min(max((i - first) / (last - first), D(0)), D(1))
        out.append(x / factor * share + x * (1 - share))

    def scale(m):
        return D(str(m)) * factor.ln() / 10 + 1 if factor > 1 else D(1)
    if "attention_factor" in s:
        attention = D(str(s["attention_factor"]))
    elif s.get("mscale") and s.get("mscale_all_dim"):
        attention = scale(s["mscale"]) / scale(s["mscale_all_dim"])
    else:
        attention = scale(1)
    return out, attention


# What a config.json of Ling 2.0 needs for tests/test_rope.c's model, whose sizes are not the class's.
LING2 = {"architectures": ["BailingMoeV2ForCausalLM"], "num_key_value_heads": 2, "n_group": 1, "num_shared_experts": 0,
         "first_k_dense_replace": 0}


def case(d, theta, longest, length=0, part=1, **scaling):
    c = {"head_dim": d, "rope_theta": theta, "max_position_embeddings": longest, "length": length or longest,
         "rope_scaling": scaling}
    if part < 1:
        c.update({**LING2, "partial_rotary_factor": part})
    values, attention = frequencies(c)
    return {**c, "frequency": [float(x) for x in values], "attention_factor": float(attention)}


CASES = [
    case(128, 600000, 16384, rope_type="linear", factor=4.0),
    case(6, 10000, 64, rope_type="linear", factor=2.5),
    case(128, 600000, 16384, length=65536, rope_type="dynamic", factor=4.0),
    case(128, 600000, 16384, length=16384, rope_type="dynamic", factor=4.0),
    case(8, 10000, 32, length=100, rope_type="dynamic", factor=2.0),
    case(128, 600000, 65536, rope_type="yarn", factor=4.0, original_max_position_embeddings=16384),
    case(128, 600000, 16384, rope_type="yarn", factor=4.0),
    case(128, 600000, 65536, rope_type="yarn", original_max_position_embeddings=16384),
    case(64, 10000, 4096, rope_type="yarn", factor=16.0, beta_fast=64.0, beta_slow=2.0, attention_factor=1.5),
    case(64, 10000, 163840, rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.707,
         mscale_all_dim=0.5),
    case(64, 10000, 4096, rope_type="yarn", factor=8.0, mscale=1.0),
    case(64, 150000, 131072, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
    case(8, 10000, 64, rope_type="yarn", factor=4.0),
    case(6, 10000, 4, rope_type="yarn", factor=2.0),
    case(16, 10000, 512, rope_type="yarn", factor=2.0, beta_fast=1.0, beta_slow=1.0),
    case(128, 600000, 131072, part=0.5, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    case(24, 10000, 64, length=200, part=0.25, rope_type="dynamic", factor=2.0),
    case(16, 10000, 64, part=0.75, rope_type="linear", factor=2.5),
]
print('{"cases": [\n' + ",\n".join(json.dumps(c) for c in CASES) + "\n]}")
