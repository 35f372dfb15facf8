"""Each Triton kernel against its torch twin in float64: in Triton's interpreter without a GPU, on the GPU with one.

Everything that a kernel must not read is filled with NaN, and everything that it must not write is compared.
"""
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels import TORCH, TRITON, scores_triton, top_triton
from selector import SelectorConfig, select

NAN, NEVER = float("nan"), float("-inf")
ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU, the kernels where there is one")
    torch.manual_seed(0)
    return request.param


def dtypes(device):
    """The interpreter has no bfloat16 dot product."""
    return (torch.float32, torch.float16) + (torch.bfloat16,) * (device == "cuda")


def wide(x):
    """x in float64, if it is a floating-point tensor."""
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def close(got, want, bound):
    """got is within `bound` of want, relative to want's size; infinities are where they should be, NaN nowhere."""
    want = want.double()
    assert got.shape == want.shape
    finite = want.isfinite()
    assert torch.equal(got.double()[~finite], want[~finite])
    error = (got.double() - want)[finite].norm() / want[finite].norm().clamp(min=1e-30)
    assert error < bound, f"relative error {error:.1e}, bound {bound}"


@pytest.mark.parametrize("size", [16, 80, 1000])
def test_rms_norm_is_torchs(device, size):
    for dtype in dtypes(device):
        x = torch.randn(2, 3, 2 * size, device=device, dtype=dtype)[..., :size]     # rows apart from each other
        weight = torch.rand(size, device=device, dtype=dtype) + 0.5
        got, rounded = TRITON.rms_norm(x, weight, 1e-6), TORCH.rms_norm(x, weight, 1e-6)
        close(got, TORCH.rms_norm(x.double(), weight.double(), 1e-6), ERROR[dtype])
        assert (got != rounded).float().mean() < 0.05 or dtype == torch.float32     # rounds where torch rounds


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 40])
def test_linear_and_swiglu_are_torchs(device, rows):
    for dtype in dtypes(device):
        x, norm = torch.randn(rows, 72, device=device, dtype=dtype), torch.rand(72, device=device, dtype=dtype) + 0.5
        weight = torch.randn(2 * 37, 72, device=device, dtype=dtype) / 8
        residual = torch.randn(rows, 2 * 37, device=device, dtype=dtype)
        for args in ((None, 0.0, None), (norm, 1e-6, None), (None, 0.0, residual), (norm, 1e-6, residual)):
            want = TORCH.linear(wide(x), wide(weight), *map(wide, args))
            *others, added = args                                           # which may be written over
            close(TRITON.linear(x, weight, *others, None if added is None else added.clone()), want, ERROR[dtype])
        close(TRITON.swiglu(x, weight, norm, 1e-6), TORCH.swiglu(*map(wide, (x, weight, norm)), 1e-6), ERROR[dtype])


@pytest.mark.parametrize("kind", ["reduce", "dot"])
def test_both_linear_kernels_cover_every_tile_edge(device, kind):
    from kernels import launch_linear
    for dtype in dtypes(device):
        x = torch.randn(3, 200, device=device, dtype=dtype)
        weight = torch.randn(74, 200, device=device, dtype=dtype) / 14
        tile = (kind, 16, 64, 4, 3)
        close(launch_linear(tile, x, weight, None, 0.0, None, False), TORCH.linear(wide(x), wide(weight)), ERROR[dtype])
        one = torch.ones(200, device=device, dtype=torch.float64)
        normed = TORCH.rms_norm(wide(x), one, 1e-6).to(dtype)
        close(launch_linear(tile, normed, weight, None, 0.0, None, True),
              TORCH.swiglu(wide(x), wide(weight), one, 1e-6), ERROR[dtype])


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_norm_and_rope_of_q_and_k_are_torchs(device, dim):
    for dtype in dtypes(device):
        heads, kv_heads, rows = 3, 2, 5
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
        norms = [torch.rand(dim, device=device, dtype=dtype) + 0.5 for _ in range(2)]
        angles = torch.rand(50, dim // 2, device=device) * 6
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        positions = torch.tensor([0, 49, 7, 7, 30], device=device)
        got = TRITON.qk_norm_rope(qkv, kv_heads, *norms, *tables, positions, 1e-6)
        same = TORCH.qk_norm_rope(qkv, kv_heads, *norms, *tables, positions, 1e-6)
        want = TORCH.qk_norm_rope(wide(qkv), kv_heads, *map(wide, norms + list(tables)), positions, 1e-6)
        for a, b, c in zip(got, same, want):
            close(a, c, ERROR[dtype])
            assert (a != b).float().mean() < 0.05 or dtype == torch.float32         # rounds where torch rounds


def attend_case(device, dtype, plan, group=2, kv_heads=2, dim=16, capacity=96, slots=40, ring=0, queries=1,
                logit_dtype=None):
    """Arguments of attend for one step of a random cache, NaN wherever the step must not look."""
    B = len(plan)
    shape = dict(device=device, dtype=dtype)
    q, k, v = (torch.randn(B, n, dim, **shape) for n in (group * kv_heads, kv_heads, kv_heads))
    keys, values = (torch.full((2, B, kv_heads, capacity, dim), NAN, **shape)[1] for _ in range(2))
    compact = [torch.full((B, kv_heads, slots, dim), NAN, **shape) for _ in range(2)] if slots else [None, None]
    held = torch.full((B, ring, group * kv_heads, dim), NAN, **shape) if ring else None
    for b, (n, start, end, slow) in enumerate(plan):
        for full, packed in zip((keys, values), compact):
            full[b, :, start : end - 1] = torch.randn(kv_heads, end - 1 - start, dim, **shape)
            if slots:
                packed[b, :, :n] = torch.randn(kv_heads, n, dim, **shape)
        for w in range(1, min(ring, end)):
            held[b, (end - 1 - w) % ring] = torch.randn(group * kv_heads, dim, **shape)
    return [q, k, v, keys, values, *compact, torch.tensor(plan, dtype=torch.int32, device=device), dim ** -0.5,
            torch.full((B, kv_heads, capacity), NAN, device=device), held, queries,
            logit_dtype and torch.full((B, kv_heads, queries * group, capacity), 7.0, device=device, dtype=logit_dtype),
            logit_dtype and torch.full((B, kv_heads, queries * group), 7.0, device=device), 4, 12]


def check_attend(args, dtype):
    want_args = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    got, want = TRITON.attend(*args), TORCH.attend(*want_args)
    close(got, want, ERROR[dtype])
    plan, keys, logits = args[7].tolist(), args[3], args[12]
    for b, (_, _, end, slow) in enumerate(plan):
        for i in (3, 4, 9, 10):                                             # keys, values, key norms, ring
            if args[i] is not None:
                same = torch.isclose(args[i][b].double(), want_args[i][b], rtol=1e-6, atol=0, equal_nan=True)
                assert same.all()
        if logits is not None:
            close(logits[b], want_args[12][b], max(ERROR[dtype], ERROR[logits.dtype]))
            torch.testing.assert_close(args[13][b].double(), want_args[13][b], rtol=2e-6, atol=2e-5)
    return got


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_any_group_of_query_heads(device, group):
    for dtype in dtypes(device):
        check_attend(attend_case(device, dtype, [(17, 40, 61, 0)], group=group), dtype)


@pytest.mark.parametrize("dim", [16, 80, 128, 256])
def test_any_head_dim(device, dim):
    for dtype in dtypes(device):
        check_attend(attend_case(device, dtype, [(20, 30, 70, 0)], dim=dim), dtype)


@pytest.mark.parametrize("compact, recent", [(0, 1), (0, 2), (1, 1), (1, 16), (15, 17), (16, 18), (17, 2), (40, 57),
                                             (0, 96)])
def test_any_length(device, compact, recent):
    check_attend(attend_case(device, torch.float32, [(compact, 96 - recent, 96, 0)]), torch.float32)


@pytest.mark.parametrize("n", [4095, 4096, 4097])
def test_lengths_round_a_large_power_of_two(device, n):
    check_attend(attend_case(device, torch.float32, [(0, 0, n, 1)], kv_heads=1, capacity=4160, slots=8,
                             logit_dtype=torch.float32), torch.float32)


def test_rows_of_different_kinds_share_a_batch(device):
    plan = [(0, 0, 90, 1), (40, 50, 61, 0), (0, 0, 1, 0), (3, 95, 96, 0), (0, 0, 33, 1)]
    for dtype in dtypes(device):
        check_attend(attend_case(device, dtype, plan, ring=4, queries=3, logit_dtype=torch.float32), dtype)


def test_rows_share_programs_where_there_are_fewer_programs_than_rows(device, monkeypatch):
    import kernels
    plan = [(0, 0, 90, 1), (40, 50, 61, 0), (0, 0, 1, 0)]
    for pieces in (1, 3, 5, 100):
        monkeypatch.setattr(kernels, "attend_tile", lambda *_: (16, 4, 2, pieces))
        check_attend(attend_case(device, torch.float32, plan, logit_dtype=torch.float32), torch.float32)


@pytest.mark.parametrize("end", [1, 2, 3, 40])
def test_an_older_query_leaves_logits_over_its_own_past_only(device, end):
    args = attend_case(device, torch.float32, [(0, 0, end, 1)], ring=5, queries=5, group=3, logit_dtype=torch.float32)
    check_attend(args, torch.float32)
    rows = args[12][0, 0]                                                   # [R, C]
    for w in range(5):
        assert (rows[w * 3 : (w + 1) * 3, : max(end - w, 0)] > NEVER).all()
        assert (rows[w * 3 : (w + 1) * 3, max(end - w, 0) : end] == NEVER).all()


@pytest.mark.parametrize("end", [1, 3, 40])
def test_a_ring_that_is_shorter_than_the_queries_asked_for(device, end):
    """As a trace may have it: a row that no query is kept for sees nothing."""
    check_attend(attend_case(device, torch.float32, [(0, 0, end, 1)], ring=64, queries=90, logit_dtype=torch.float32),
                 torch.float32)


@pytest.mark.parametrize("end, sink, recent", [
    (1, 0, 0), (40, 0, 0), (40, 39, 0), (40, 4, 36), (40, 17, 5), (9, 20, 3)])
def test_the_candidates_sum_leaves_out_sink_and_recent(device, end, sink, recent):
    """Even where a logit outside is so large that next to it all candidates would be nothing."""
    args = attend_case(device, torch.float32, [(0, 0, end, 1)], ring=3, queries=3, logit_dtype=torch.float32)
    args[14:] = sink, recent
    check_attend(args, torch.float32)
    z, lse = args[12][0, ..., min(sink, end) : max(end - recent, min(sink, end))], args[13][0]
    assert (lse.isfinite() == (z > NEVER).any(-1)).all()
    if 0 < sink < end:
        args[0] *= 1e3 / args[12][0, 0, 0, 0]                               # 1000 in the sink
        check_attend(args, torch.float32)
        assert torch.equal(args[13][0].isfinite(), lse.isfinite())


def test_logits_are_rounded_once_to_the_buffers_dtype(device):
    check_attend(attend_case(device, torch.float16, [(0, 0, 50, 1)], logit_dtype=torch.float16), torch.float16)


def test_a_query_head_reads_the_kv_head_of_its_group(device):
    args = attend_case(device, torch.float32, [(12, 40, 60, 0)], group=3)
    for x in (args[2], args[4], args[6]):
        x[:] = torch.arange(2, device=device)[:, None] if x.ndim == 3 else torch.arange(2, device=device)[:, None, None]
    out = TRITON.attend(*args)
    torch.testing.assert_close(out, (torch.arange(6, device=device) // 3)[None, :, None].expand_as(out).float())


def test_huge_logits_do_not_overflow(device):
    args = attend_case(device, torch.float32, [(12, 40, 60, 0)])
    args[0] *= 1e4
    check_attend(args, torch.float32)


def candidates_lse(logits, plan, sink, recent):
    """What attend would have left beside logits [n, B, G, R, C] -> [n, B, G, R]."""
    return torch.stack([logits[:, b, ..., min(sink, end) : max(end - recent, min(sink, end))].logsumexp(-1)
                        for b, (_, _, end, _) in enumerate(plan)], dim=1)


def publish_case(device, plan, layers=1, kv_heads=2, rows=2, capacity=160, dim=16, sink=4, selected=24, blind=False):
    """Arguments of publish, NaN wherever it must not look."""
    B = len(plan)
    logits = torch.full((layers, B, kv_heads, rows, capacity), NAN, device=device)
    norms = torch.full((layers, B, kv_heads, capacity), NAN, device=device)
    keys, values = (torch.full((layers + 1, B, kv_heads, capacity, dim), NAN, device=device)[1:] for _ in range(2))
    for b, (_, _, end, slow) in enumerate(plan):
        for x in (keys, values):
            x[:, b, :, :end] = torch.randn(layers, kv_heads, end, dim, device=device)
        norms[:, b, :, :end] = keys[:, b, :, :end].norm(dim=-1)
        if slow:
            logits[:, b, ..., :end] = 3 * torch.randn(layers, kv_heads, rows, end, device=device)
            if blind:                                                       # older rows see less, the last ones nothing
                for r in range(rows):
                    logits[:, b, :, r, max(end - end * r // (rows - 1), 0) : end] = NEVER
    positions = torch.full((layers, B, kv_heads, selected), -1, device=device)
    compact = [torch.full((layers, B, kv_heads, sink + selected, dim), 7.0, device=device) for _ in range(2)]
    return [logits, candidates_lse(logits, plan, sink, 32), norms, keys, values,
            torch.tensor(plan, dtype=torch.int32, device=device), sink, 32, None, positions, *compact]


SHORT = [(0, 0, n, 1) for n in (1, 3, 4, 36, 37, 45, 160)]                  # from no candidates to more than selected


@pytest.mark.parametrize("plan, layers, knobs", [
    ([(0, 0, 150, 1), (20, 100, 140, 0), (0, 0, 160, 1)], 2, {}), (SHORT, 1, dict(spread=8)),
    (SHORT, 1, dict(nms_window=0, exclusivity_alpha=0)),
    ([(0, 0, 150, 1)], 1, dict(alpha=2.0, spread=3, nms_window=20))])
def test_publish_selects_and_copies_what_torch_does(device, plan, layers, knobs):
    got = publish_case(device, plan, layers)
    got[8] = SelectorConfig(**knobs)
    want = [x.clone() if isinstance(x, torch.Tensor) else x for x in got]
    TRITON.publish(*got)
    TORCH.publish(*want)
    for a, b in zip(got[9:], want[9:]):
        assert torch.equal(a, b)


LONG = dict(lambda_cap_multi=1.0)                                          # lambda itself, not its cap


@pytest.mark.parametrize("kv_heads, rows, blind, knobs", [
    (1, 1, False, {}), (2, 1, False, {}), (8, 3, True, {}), (3, 5, True, dict(alpha=0)), (3, 2, False, dict(alpha=0)),
    (3, 5, True, dict(alpha=2.0, spread=8, nms_window=6)), (1, 2, True, dict(nms_window=1000, spread=300)),
    (2, 3, True, dict(weight_norm=0, weight_position=0)), (1, 2, False, LONG),
    (1, 1, False, dict(position_power=0)), (1, 1, False, dict(position_power=0.001, weight_position=10))])
def test_every_stage_of_the_selector_is_torchs(device, kv_heads, rows, blind, knobs):
    """Also where the candidates fill several parts, each summed by a program of its own, and blocks of a part."""
    plan = [(0, 0, 4600, 1)] if knobs is LONG else [(0, 0, 150, 1), (0, 0, 38, 1)]
    logits, _, norms, _, _, on_device, sink, recent, *_ = publish_case(device, plan, 1, kv_heads, rows,
                                                                    capacity=plan[0][2] + 10, blind=blind)
    logits *= 0.1 if knobs is LONG else 1                                   # f near r
    config = SelectorConfig(**knobs)
    lse = candidates_lse(logits, plan, sink, recent)
    log_f, lam, log_s, exclusive, spread, extent = scores_triton(logits, lse, norms, on_device, sink, recent, config)
    for b, (_, _, end, _) in enumerate(plan):
        lo, hi = sink, end - recent
        assert torch.equal(extent[0, b, ..., 0].amin(-1), spread[0, b, :, lo:hi].amin(-1))
        assert torch.equal(extent[0, b, ..., 1].amax(-1), spread[0, b, :, lo:hi].amax(-1))
        want = select(logits[0, b, ..., :end].double(), norms[0, b, :, :end].double(), lo, hi, 8, config)
        stages = [x[0, b, :, lo:hi].double() for x in (log_f, log_s, exclusive, spread)]
        stages[0] = torch.where(stages[0].isfinite().any(-1, keepdim=True), stages[0], 0).log_softmax(-1)
        stages[2:] = [x.masked_fill(x < -1e37, NEVER) for x in stages[2:]]
        for x, y in zip(stages, (want.log_evidence, want.log_fused, want.log_exclusive, want.log_spread)):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lam[0, b].double(), want.lam, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reach", [1, 2, 3, 255, 256, 257, 512, 513, 514])
def test_the_window_reaches_as_far_as_it_should(device, reach):
    """Scores that rise show it: the largest is the last. A reach beyond 256 is several windows side by side."""
    plan, C, config = [(0, 0, 1200, 1)], 1200, SelectorConfig(nms_window=2 * reach, spread=reach, lambda_cap_single=0)
    logits, norms = torch.arange(C, device=device).view(1, 1, 1, 1, C) / 100, torch.ones(1, 1, 1, C, device=device)
    on_device = torch.tensor(plan, dtype=torch.int32, device=device)
    got = scores_triton(logits, candidates_lse(logits, plan, 0, 0), norms, on_device, 0, 0, config)
    want = select(logits[0, 0].double(), norms[0, 0].double(), 0, C, 8, config)
    torch.testing.assert_close(got.log_exclusive[0, 0].double(), want.log_exclusive, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got.log_spread[0, 0], want.log_spread, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_best_are_found_among_ties_and_across_parts(device, dtype):
    """Against a stable sort; equal scores go to the first positions. 5000 scores are two parts of a head."""
    plan, sink, recent, C = [(0, 0, 5000, 1), (0, 0, 300, 0), (0, 0, 300, 1), (0, 0, 40, 1)], 3, 50, 5000
    scores = torch.randn(1, len(plan), 5, C, dtype=dtype)
    scores[:, :, 1] = (scores[:, :, 1] * 2).round() - 0.25                  # a dozen values
    scores[:, :, 2] = -3e38                                                 # one value
    scores[:, :, 3] = torch.where(scores[:, :, 3] > 0, 0.0, -0.0)           # one value, written in two ways
    scores[:, :, 4] = scores[:, :, 4].exp() * 1e30                          # of all sizes
    extent = scores.new_empty(1, len(plan), 5, 2, 2)
    for b, (_, _, end, _) in enumerate(plan):
        scores[:, b, :, :sink], scores[:, b, :, max(end - recent, 0) :] = NEVER, NEVER
        for block, part in enumerate(scores[0, b, :, sink : max(end - recent, sink)].tensor_split(2, -1)):
            extent[0, b, :, block] = torch.stack([part.amin(-1), part.amax(-1)], -1) if part.shape[-1] else (
                torch.tensor([-NEVER, NEVER]))
    on_device = torch.tensor(plan, dtype=torch.int32, device=device)
    for K in (0, 700, 4096):
        positions = torch.full((1, len(plan), 5, K), -1, device=device)
        top_triton(scores.to(device), extent.to(device), on_device, sink, recent, positions)
        for b, (_, _, end, slow) in enumerate(plan):
            mine = scores[0, b, :, sink : max(end - recent, sink)]
            count = min(K, mine.shape[-1]) if slow else 0
            want = mine.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values + sink
            assert torch.equal(positions[0, b, :, :count].cpu(), want) and (positions[0, b, :, count:] == -1).all()


def test_logits_may_end_before_the_cache_does(device):
    """The bootstrap's logits hold the prompt's N positions, the cache C."""
    got = publish_case(device, [(0, 0, 101, 1)], rows=3, blind=True)
    got[0], got[8] = got[0][..., :101].contiguous(), SelectorConfig()
    want = [x.clone() if isinstance(x, torch.Tensor) else x for x in got]
    TRITON.publish(*got)
    TORCH.publish(*want)
    for a, b in zip(got[9:], want[9:]):
        assert torch.equal(a, b)


def test_a_candidate_that_no_row_sees_is_selected_before_what_is_no_candidate(device):
    args = publish_case(device, [(0, 0, 100, 1)], rows=3, blind=True, selected=70)      # row 1 sees only [0, 50)
    args[8] = SelectorConfig(alpha=0, lambda_cap_multi=0.0)                 # -inf where one row is
    TRITON.publish(*args)
    assert (args[9][..., :64] == torch.arange(4, 68, device=device)).all()


def test_rows_that_are_fast_keep_their_selection(device):
    args = publish_case(device, [(20, 100, 140, 0), (0, 0, 150, 1)])
    args[8] = SelectorConfig()
    TRITON.publish(*args)
    for before, after in zip((-1, 7, 7), args[9:]):
        assert (after[:, 0] == before).all() and (after[:, 1] != before).any()


def test_more_queries_than_a_card_has_room_for_are_refused():
    with pytest.raises(ValueError, match="1040 rows of queries do not fit on this card: fewer evidence_queries would"):
        kernels.attend_tile(8, 4096, "logits", 1040, 128, 2, torch.device("cpu"))


def test_no_kernel_spills_in_its_loop_over_tiles():
    """For sm_80, sm_90 and sm_100; needs no GPU."""
    script = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
