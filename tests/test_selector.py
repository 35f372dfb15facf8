"""The Selector against golden files from an independent float64 program, and against what its formulas promise."""
import json
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open

import selector
from selector import SelectorConfig, kept_mass, overlap, select, support, support_at_mass

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "selector").glob("*.safetensors"))
INF = float("inf")
PAPER = SelectorConfig()
each = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def golden(path):
    with safe_open(path, "pt") as file:
        meta = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    config = SelectorConfig(**json.loads(meta["config"]))
    return tensors, int(meta["lo"]), int(meta["hi"]), int(meta["k"]), config


def assert_close(got, want, tolerance, name=""):
    """Equal within tolerance, relative to the largest finite magnitude (at least 1); infinities in the same places."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape and torch.equal(got.isinf(), want.isinf()) and not got.isnan().any(), name
    finite = want.isfinite()
    if finite.any():
        scale = want[finite].abs().max().clamp(min=1)
        assert (got - want)[finite].abs().max() <= tolerance * scale, name


def assert_same(got, want, tolerance=1e-12):
    """Two Selections: every stage within tolerance, and selected scores equal where ties leave positions free."""
    for name in got._fields[:-1]:
        assert_close(getattr(got, name), getattr(want, name), tolerance, name)
    assert got.positions.shape == want.positions.shape


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def inputs(draw, dtype=torch.float64):
    """logits [G, R, N], some of whose rows see only a part or nothing of it; key norms [G, N], some 0; lo; hi."""
    G, R, N = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(0, 50))
    lo, hi = sorted((draw(st.integers(0, N)), draw(st.integers(0, N))))
    seed, scale = draw(st.integers(0, 10**6)), draw(st.sampled_from([0, 1, 10, 1000]))
    logits = random(seed, G, R, N, dtype=dtype) * scale
    seen = torch.tensor(draw(st.lists(st.integers(0, N + 1), min_size=R, max_size=R)))
    logits = logits.masked_fill(torch.arange(N) >= seen[:, None], -INF)
    return logits, random(seed + 1, G, N, dtype=dtype).clamp(min=0) * 8, lo, hi


configs = st.builds(
    SelectorConfig, alpha=st.sampled_from([0, 0.5, 1, 2, 1000]), gamma=st.sampled_from([0, 0.5]),
    weight_position=st.sampled_from([0, 0.7]), lambda_cap_single=st.sampled_from([0, 0.35]),
    lambda_cap_multi=st.sampled_from([0, 0.25]), nms_window=st.integers(0, 70), nms_alpha=st.sampled_from([0, 1]),
    exclusivity_alpha=st.sampled_from([0, 0.85]), eps=st.sampled_from([1e-30, 1e-12, 1]),
    spread=st.sampled_from([0, 3, 70]))
# Legal, but these magnify the last bit of what stands before them.
extremes = st.sampled_from([{}, dict(lambda_cap_single=1, lambda_cap_multi=1), dict(exclusivity_temperature=1e-6),
                            dict(exclusivity_temperature=1e6), dict(nms_alpha=1000, exclusivity_alpha=1000)])


# The golden files

def test_the_golden_files_are_there():
    assert len(GOLDEN) == 17


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "fp32"])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_select_matches_the_golden_file_stage_by_stage(path, dtype, tolerance):
    want, lo, hi, count, config = golden(path)
    got = select(want["logits"].to(dtype), want["key_norms"].to(dtype), lo, hi, count, config)
    for name in got._fields[:-1]:
        assert_close(getattr(got, name), want[name], tolerance, name)
    scores, ranked = want["log_spread"], want["log_spread"].sort(-1, descending=True).values
    tie = tolerance * ranked.abs().max()
    assert got.positions.dtype == torch.int64 and got.positions.shape == want["positions"].shape
    for head, (mine, theirs) in enumerate(zip(got.positions, want["positions"])):
        assert torch.equal(mine, mine.unique())                                             # ascending
        worth = scores[head, mine - lo].sort(descending=True).values
        assert (worth - ranked[head, : len(mine)]).abs().max() <= tie
        if len(mine) < hi - lo and ranked[head, len(mine) - 1] - ranked[head, len(mine)] > tie:
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_each_stage_alone_turns_golden_inputs_into_golden_outputs(path):
    want, lo, hi, count, config = golden(path)
    logits, key_norms = want["logits"].double(), want["key_norms"].double()
    rows = torch.full_like(want["lam"], logits.shape[-2])
    for name, got in dict(
        log_evidence=selector.evidence(logits, lo, hi, config.alpha),
        log_prior=selector.prior(key_norms, lo, hi, config),
        lam=selector.mixing_weight(want["log_evidence"], want["log_prior"], rows, config),
        log_fused=selector.fuse(want["log_evidence"], want["log_prior"], want["lam"]),
        log_nms=selector.soft_nms(want["log_fused"], config.nms_window, config.nms_alpha),
        log_exclusive=selector.exclude(want["log_nms"], config.exclusivity_alpha, config.exclusivity_temperature,
                                       config.eps),
        log_spread=selector.spread(want["log_exclusive"], config.spread),
    ).items():
        assert_close(got, want[name], 1e-12, name)


# Evidence and prior

@each
@given(inputs(), st.sampled_from([0, 0.5, 1, 2]))
def test_evidence_is_the_power_mean_of_what_each_row_sees(drawn, alpha):
    logits, _, lo, hi = drawn
    logits = logits.clamp(-20, 20).masked_fill(logits == -INF, -INF)
    got = selector.evidence(logits, lo, hi, alpha).exp()
    for head, f in zip(logits[..., lo:hi], got):
        p = torch.stack([row.exp() / row.exp().sum() for row in head if (row > -INF).any()] or [torch.ones(hi - lo)])
        want = p.double().prod(0) ** (1 / len(p)) if alpha == 0 else (p.double() ** alpha).mean(0) ** (1 / alpha)
        want = want if want.sum() > 0 else torch.ones_like(want)
        torch.testing.assert_close(f, want / want.sum())


def test_a_small_alpha_still_tells_positions_apart_in_fp32():
    logits = random(0, 2, 128, 500, dtype=torch.float32)
    assert_close(selector.evidence(logits, 0, 500, 0.01), selector.evidence(logits.double(), 0, 500, 0.01), 5e-5)


@each
@given(inputs(), configs, st.integers(0, 10**6))
def test_a_row_that_sees_no_candidate_counts_as_absent(drawn, config, seed):
    logits, key_norms, lo, hi = drawn
    blind = random(seed, logits.shape[-2]) > 0
    blind[0] = False
    logits[:, blind, lo:hi] = -INF
    assert_same(select(logits, key_norms, lo, hi, 5, config), select(logits[:, ~blind], key_norms, lo, hi, 5, config))


def test_rows_that_see_no_candidate_are_counted_head_by_head():
    logits, key_norms = random(0, 3, 2, 30) * 3, random(1, 3, 30).abs()
    logits[1, 0], logits[2] = -INF, -INF
    got = select(logits, key_norms, 0, 30, 5, PAPER)
    assert got.lam.tolist() == pytest.approx([0.25, 0.35, 0])
    assert_close(got.log_evidence[1], logits[1, 1].log_softmax(-1), 1e-12)
    assert_close(got.log_evidence[2], torch.full((30,), 1 / 30).log(), 1e-7)                # nothing seen: flat


@each
@given(st.integers(0, 10**6), configs)
def test_adding_a_constant_to_a_row_changes_nothing(seed, config):
    logits = (random(seed, 2, 4, 40) * 64).round().float() / 64                              # +1e4 stays exact in fp32
    key_norms = random(seed, 2, 40, dtype=torch.float32).abs()
    shift = torch.tensor([1e4, -1e4, 0, 7])[:, None]
    assert_same(select(logits + shift, key_norms, 3, 37, 9, config), select(logits, key_norms, 3, 37, 9, config), 1e-5)


@each
@given(st.integers(0, 10**6), st.integers(1, 20), *[st.floats(0.1, 3)] * 6, st.floats(0.1, 1))
def test_the_prior_is_its_formula_for_any_knobs(seed, n, gamma, weight_norm, weight_position, power, eta, p, theta):
    norms = random(seed, n).clamp(min=0)
    config = SelectorConfig(gamma=gamma, weight_norm=weight_norm, weight_position=weight_position,
                            position_power=power, position_eta=eta, theta=theta, p=p)
    weights = []
    for i, norm in enumerate(norms.tolist()):
        x = i / max(n - 1, 1)
        place = theta ** (x**power / p) * max(1 - x, 1e-12) ** eta
        weights.append(max(norm, 1e-12) ** (-gamma * weight_norm) * place**weight_position)
    want = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(selector.prior(norms[None], 0, n, config).exp(), want[None] / want.sum())


def test_the_prior_leans_away_from_large_keys_and_late_positions():
    by_place = selector.prior(torch.ones(1, 50), 5, 50, PAPER)
    assert (by_place.diff() < 0).all()
    by_norm = selector.prior(torch.linspace(0, 9, 50)[None], 5, 50, replace(PAPER, weight_position=0))
    assert (by_norm.diff() < 0).all()


def test_fp32_stays_close_to_float64_over_128k_candidates():
    logits, key_norms = random(0, 2, 4, 131072).float() * 3, random(1, 2, 131072).float().abs()
    got = select(logits, key_norms, 4, 131000, 2048, PAPER)
    want = select(logits.double(), key_norms.double(), 4, 131000, 2048, PAPER)
    assert_same(got, want, 2e-6)
    assert (got.log_prior - want.log_prior).abs().max() < 2e-5                              # the last places included
    assert overlap(got.positions, want.positions).min() > 0.99


# Fusion

def distributions(seed, scale_f, scale_r):
    return (random(seed, 3, 20) * scale_f).log_softmax(-1), (random(seed + 1, 3, 20) * scale_r).log_softmax(-1)


def objective(log_f, log_r, lam, log_s):
    kl = lambda log_p: (log_p.exp() * (log_p - log_s)).sum(-1)
    return (1 - lam) * kl(log_f) + lam * kl(log_r)


@each
@given(st.integers(0, 10**6), st.floats(0, 6), st.floats(0, 6), st.floats(0, 1), st.floats(1e-3, 3))
def test_the_mixture_minimises_the_divergence_to_evidence_and_prior(seed, scale_f, scale_r, lam, step):
    log_f, log_r = distributions(seed, scale_f, scale_r)
    lam = torch.full((3,), lam, dtype=torch.float64)
    log_s = selector.fuse(log_f, log_r, lam)
    torch.testing.assert_close(log_s.exp().sum(-1), torch.ones_like(lam))
    best = objective(log_f, log_r, lam, log_s)
    for other in range(5):
        perturbed = (log_s + step * random(seed + other, 3, 20)).log_softmax(-1)
        assert (objective(log_f, log_r, lam, perturbed) > best).all()
    free = log_s.clone().requires_grad_()
    objective(log_f, log_r, lam, free.log_softmax(-1)).sum().backward()
    assert free.grad.abs().max() < 1e-12


@each
@given(st.integers(0, 10**6), st.floats(0, 6), st.floats(0, 6), st.sampled_from([(0.0, 1.0), (1.0, 0.0), (0.35, 0.25)]))
def test_lambda_minimises_the_quadratic_inside_its_clip(seed, scale_f, scale_r, caps):
    log_f, log_r = distributions(seed, scale_f, scale_r)
    config = SelectorConfig(lambda_cap_single=caps[0], lambda_cap_multi=caps[1])
    for rows, cap in ((1, caps[0]), (2, caps[1]), (9, caps[1])):
        lam = selector.mixing_weight(log_f, log_r, torch.tensor([rows] * 3), config)
        assert ((lam >= 0) & (lam <= cap)).all()
        size = lambda weight: ((1 - weight) * log_f.exp() + weight * log_r.exp()).square().sum(-1)
        grid = torch.stack([size(weight) for weight in torch.linspace(0, cap, 101, dtype=torch.float64)])
        assert (size(lam[:, None]) <= grid.min(0).values + 1e-14).all()


def test_scores_far_below_the_range_of_fp32_stay_apart():
    logits = -torch.arange(40.0) * 1000
    got = select(logits[None, None], torch.ones(1, 40), 0, 40, 9, replace(PAPER, lambda_cap_single=0))
    assert torch.equal(got.log_fused[0], logits)


def test_lambda_is_zero_where_evidence_equals_prior():
    log_f, _ = distributions(0, 2, 2)
    assert selector.mixing_weight(log_f, log_f, torch.tensor([1, 2, 3]), PAPER).tolist() == [0, 0, 0]


# Windows, heads, spread

@each
@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(0, 15), st.sampled_from([torch.float32, torch.float64]))
def test_a_window_reaches_equally_far_to_both_sides_and_stops_at_the_ends(seed, n, reach, dtype):
    scores = random(seed, 2, 3, n, dtype=dtype)
    got = selector.window_max(scores, reach)
    assert got.shape == scores.shape and got.dtype == dtype
    for i in range(n):
        assert torch.equal(got[..., i], scores[..., max(0, i - reach) : i + reach + 1].amax(-1))


@pytest.mark.parametrize("window, reach", [(0, 0), (1, 0), (2, 1), (5, 2), (32, 16)])
def test_a_peak_lowers_its_neighbours_half_a_window_away_and_no_further(window, reach):
    scores = torch.full((1, 81), -1.0)
    scores[0, 40] = 0
    lowered = selector.soft_nms(scores, window, 0.5)[0] < scores[0]
    assert lowered.nonzero().flatten().tolist() == [i for i in range(40 - reach, 41 + reach) if i != 40]


@each
@given(inputs(), st.integers(0, 70), st.sampled_from([0, 0.5, 1]))
def test_soft_nms_keeps_peaks_and_raises_nothing(drawn, window, strength):
    scores = drawn[0][:, 0]
    got = selector.soft_nms(scores, window, strength)
    peak = scores == selector.window_max(scores, window // 2)
    assert torch.equal(got[peak], scores[peak]) and (got <= scores).all()
    below = ~peak & (scores > -INF)
    assert (got[below] < scores[below]).all() or strength == 0


def test_exclusivity_takes_from_the_weaker_head_and_leaves_one_head_alone():
    scores = torch.tensor([[-1.0, -9.0, -4.0], [-9.0, -1.0, -4.0]])
    lost = scores - selector.exclude(scores, 0.85, 2.0, 1e-12)
    assert lost[0, 0] < lost[0, 2] < lost[0, 1] and torch.equal(lost[0], lost[1, [1, 0, 2]])
    assert torch.equal(selector.exclude(scores[:1], 0.85, 2.0, 1e-12), scores[:1])
    floored = scores - selector.exclude(scores, 1.0, 2.0, 0.4)                               # no share below eps
    assert floored[0, 1].item() == pytest.approx(-torch.tensor(0.4).log().item())


def test_spread_brings_the_neighbourhood_and_settles_its_ties_by_the_better_token():
    scores = torch.full((1, 40), -12.0)
    scores[0, 14:27] += torch.tensor([9, 8, 7, 6, 5, 4, 900, 3, 2, 1, 10, 11, 12]) / 100     # peak at 20
    positions = selector.top(selector.spread(scores, 3), 100, 5)
    assert positions.tolist() == [[117, 118, 119, 120, 121]]
    assert selector.spread(scores, 0) is scores


# The whole

@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 40])
@pytest.mark.parametrize("spread", [0, 2])
def test_positions_are_the_best_candidates_ascending_and_unique(n, spread):
    for count in (0, 5):
        got = select(random(n, 2, 3, 4, 60), random(1, 2, 3, 60).abs(), 7, 7 + n, count, replace(PAPER, spread=spread))
        assert got.positions.shape == (2, 3, min(count, n)) and got.positions.dtype == torch.int64
        assert (got.positions.diff() > 0).all() and ((got.positions >= 7) & (got.positions < 7 + n)).all()
        chosen = torch.zeros(2, 3, n, dtype=torch.bool).scatter(-1, got.positions - 7, True)
        for best, scores in zip(chosen.flatten(0, 1), got.log_spread.flatten(0, 1)):
            if 0 < best.sum() < n:
                assert scores[best].min() > scores[~best].max()


@each
@given(inputs(), configs, st.integers(0, 10**6))
def test_relabelling_heads_relabels_the_selection(drawn, config, seed):
    logits, key_norms, lo, hi = drawn
    heads = random(seed, len(logits)).argsort()
    want = select(logits, key_norms, lo, hi, 5, config)
    got = select(logits[heads], key_norms[heads], lo, hi, 5, config)
    assert_same(got, selector.Selection(*(stage[heads] for stage in want)))


@each
@given(inputs(), configs, st.integers(0, 10**6))
def test_without_places_and_windows_relabelling_positions_relabels_the_scores(drawn, config, seed):
    logits, key_norms, lo, hi = drawn
    config = replace(config, weight_position=0, nms_window=0, spread=0)
    order = random(seed, hi - lo).argsort()
    want = select(logits, key_norms, lo, hi, 5, config)
    got = select(logits[..., lo:hi][..., order], key_norms[..., lo:hi][..., order], 0, hi - lo, 5, config)
    assert_same(got, selector.Selection(*(x if x is want.lam or x is want.positions else x[..., order] for x in want)))
    worth = [x.log_spread.gather(-1, x.positions - start).sort().values for x, start in ((got, 0), (want, lo))]
    assert_close(*worth, 1e-12)


@each
@given(inputs(), configs, st.integers(0, 10**6))
def test_relabelling_rows_changes_nothing(drawn, config, seed):
    logits, key_norms, lo, hi = drawn
    rows = random(seed, logits.shape[-2]).argsort()
    assert_same(select(logits[:, rows], key_norms, lo, hi, 5, config), select(logits, key_norms, lo, hi, 5, config))


@each
@given(st.integers(0, 10**6), configs, st.sampled_from([(torch.float32, 1e-5), (torch.float64, 1e-12)]))
def test_a_batch_equals_its_members_one_by_one(seed, config, precision):
    dtype, tolerance = precision
    logits, key_norms = random(seed, 2, 3, 2, 4, 30, dtype=dtype), random(seed, 2, 3, 2, 30, dtype=dtype).abs()
    logits[0, 1, :, 2:, 10:] = -INF
    together = select(logits, key_norms, 2, 29, 6, config)
    for i in range(2):
        for j in range(3):
            alone = select(logits[i, j], key_norms[i, j], 2, 29, 6, config)
            assert_same(selector.Selection(*(stage[i, j] for stage in together)), alone, tolerance)


@each
@given(inputs(), configs)
def test_what_stands_outside_the_candidates_is_not_read(drawn, config):
    logits, key_norms, lo, hi = drawn
    want = select(logits, key_norms, lo, hi, 5, config)
    for tensor in (logits, key_norms):
        tensor[..., :lo] = tensor[..., hi:] = float("nan")
    assert all(map(torch.equal, select(logits, key_norms, lo, hi, 5, config), want))


@each
@given(inputs(dtype=torch.float32), configs, extremes, st.integers(0, 60))
def test_no_input_and_no_legal_knob_makes_a_nan(drawn, config, extreme, count):
    logits, key_norms, lo, hi = drawn
    got = select(logits, key_norms, lo, hi, count, replace(config, **extreme))
    assert not any(stage.isnan().any() for stage in got)
    assert got.positions.shape == (len(logits), min(count, hi - lo))
    assert all(torch.equal(row, row.unique()) for row in got.positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_at_least_fp32_at_every_stage(dtype):
    logits, key_norms = random(0, 2, 4, 40, dtype=dtype), random(1, 2, 40, dtype=dtype).abs()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = select(logits, key_norms, 0, 40, 9, PAPER)
    assert all(stage.dtype == wide for stage in got[:-1])
    assert all(map(torch.equal, got, select(logits.to(wide), key_norms.to(wide), 0, 40, 9, PAPER)))


@pytest.mark.parametrize("lo, hi, count", [(-1, 5, 3), (6, 5, 3), (0, 11, 3), (0, 5, -1)])
def test_candidates_that_do_not_fit_are_refused(lo, hi, count):
    with pytest.raises(ValueError, match=rf"cannot select {count} .*\[{lo}, {hi}\) among 10"):
        select(torch.zeros(1, 1, 10), torch.zeros(1, 10), lo, hi, count, PAPER)


def test_key_norms_of_other_positions_and_a_negative_support_are_refused():
    with pytest.raises(ValueError, match="key_norms has 9 positions"):
        select(torch.zeros(1, 1, 10), torch.zeros(1, 9), 0, 5, 3, PAPER)
    with pytest.raises(ValueError, match="count"):
        support(torch.ones(3), -1)


# The knobs

def test_the_defaults_are_the_papers_throughput_runs():
    assert asdict(PAPER) == dict(
        alpha=0.5, gamma=0.5, weight_norm=1.0, weight_position=0.7, position_power=1.8, position_eta=0.4, theta=0.6,
        p=0.9, lambda_cap_single=0.35, lambda_cap_multi=0.25, nms_window=32, nms_alpha=1.0, exclusivity_alpha=0.85,
        exclusivity_temperature=2.0, eps=1e-12, spread=0)


@pytest.mark.parametrize("knob, value", [
    *((knob, value) for knob in asdict(PAPER) for value in (float("nan"), INF, -INF, -1, -0.5, "1", None, True)),
    ("alpha", 0.009), ("theta", 0), ("theta", 1.1), ("p", 0), ("lambda_cap_single", 1.1), ("lambda_cap_multi", 1.1),
    ("nms_window", 1.5), ("spread", 2.0), ("exclusivity_temperature", 0), ("eps", 0)])
def test_a_knob_out_of_range_is_refused_by_name_and_value(knob, value):
    with pytest.raises(ValueError) as refusal:
        SelectorConfig(**{knob: value})
    assert str(refusal.value).startswith(f"{knob} must be ") and str(refusal.value).endswith(f"not {value!r}")


def test_knobs_may_stand_at_the_ends_of_their_ranges_and_never_change():
    SelectorConfig(**{knob: 0 for knob in asdict(PAPER)} | dict(theta=1, p=1, exclusivity_temperature=1, eps=1))
    SelectorConfig(lambda_cap_single=1, lambda_cap_multi=1, alpha=2)
    with pytest.raises(FrozenInstanceError):
        PAPER.alpha = 1


# Stability

position_sets = st.sets(st.integers(0, 30), max_size=20)


@each
@given(position_sets, position_sets, st.integers(0, 3), st.randoms())
def test_overlap_is_the_jaccard_index_whatever_order_and_padding(a, b, padding, shuffler):
    x, y = (shuffler.sample([*s, *[-1] * padding], len(s) + padding) for s in (a, b))
    x, y = torch.tensor(x, dtype=torch.int64), torch.tensor(y, dtype=torch.int64)
    assert overlap(x, y) == overlap(y, x) == pytest.approx(len(a & b) / len(a | b) if a | b else 1)
    assert overlap(x, x) == 1


def test_overlap_and_kept_mass_take_any_batch():
    p = random(0, 2, 3, 25).softmax(-1)
    a, b = support(p, 6), support(p.flip(-1), 9)
    shared, held = overlap(a, b), kept_mass(p, a)
    assert shared.shape == held.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            assert shared[i, j] == overlap(a[i, j], b[i, j])
            assert held[i, j] == pytest.approx(p[i, j, a[i, j]].sum().item())


@each
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_a_larger_support_keeps_more_mass_and_no_other_set_of_its_size_does(seed, N, dtype):
    p = (random(seed, 2, N) * 3).softmax(-1).to(dtype)
    held = torch.stack([kept_mass(p, support(p, count)) for count in range(N + 2)])
    assert (held[0] == 0).all() and (held.diff(dim=0) >= -1e-6).all()
    torch.testing.assert_close(held[-1], p.sum(-1, dtype=torch.promote_types(dtype, torch.float32)))
    for count in range(N):
        other = random(seed + count, 2, N).argsort()[:, :count]
        assert (kept_mass(p, other) <= held[count] + 1e-6).all()


@each
@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0, 1))
def test_support_at_mass_is_the_smallest_set_that_holds_it(seed, N, mass):
    p = (random(seed, 3, N) * 3).softmax(-1)
    together = support_at_mass(p, mass)
    assert torch.equal(together, together.sort(-1).values)
    for row, positions in zip(p, together):
        alone = positions[positions >= 0]
        assert torch.equal(alone, support(row, len(alone)))
        assert kept_mass(row, positions) == pytest.approx(row[alone].sum().item()) and row[alone].sum() >= mass - 1e-12
        assert len(alone) == 0 or kept_mass(row, support(row, len(alone) - 1)) < mass + 1e-12
    assert (together >= 0).sum(-1).max() == together.shape[-1]


def test_support_at_mass_of_a_plain_case():
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.125, 0.125, 0.25, 0.5]])
    assert support_at_mass(p, 0.5).tolist() == [[0], [3]]
    assert support_at_mass(p, 1).tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3]]
    assert support_at_mass(p * 0.999, 1).tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3]]          # of what there is
    assert support_at_mass(p, 0).shape == (2, 0)
    for mass in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="mass must be in"):
            support_at_mass(p, mass)
