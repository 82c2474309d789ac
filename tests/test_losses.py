"""Shapes: B rows (one completion each), T tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.algorithms.losses import NORMALISERS, POLICY_LOSSES, count_trained

LOSSES, WEIGHTS = list(POLICY_LOSSES), list(NORMALISERS)
NAN = float("nan")
CONSTANT_LENGTH = 7.0


# long: a test names what it varies
def step_loss(loss, normaliser, logp, old, adv, mask, totals=None, low=0.2, high=0.2):
    total_tokens, total_sequences = totals or count_trained(mask)
    weight = NORMALISERS[normaliser](mask, total_tokens, total_sequences, CONSTANT_LENGTH)
    return (POLICY_LOSSES[loss](logp, old, adv, mask, low, high).loss_BT * weight).sum()


def batch(lengths: list[int], seed: int, spread: float = 0.3):
    """(logprobs with gradient, old log-probs, advantages, mask) of rows with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    old = -3 * torch.rand(shape, generator=generator) - 0.1
    logp = (old + spread * torch.randn(shape, generator=generator)).requires_grad_()
    adv = torch.randn(shape[0], generator=generator)
    mask = torch.arange(shape[1])[None, :] < torch.tensor(lengths)[:, None]
    return logp, old, adv, mask


def test_ppo_by_hand():
    # Ratios 1.5, 0.5, 1.1 and bounds [0.8, 1.3].
    # A = 2:  -min(3, 2.6) = -2.6 (clipped), -min(1, 1.6) = -1, -min(2.2, 2.2) = -2.2
    # A = -1: -min(-1.5, -1.3) = 1.5, -min(-0.5, -0.8) = 0.8 (clipped), 1.1
    ratio = torch.tensor([[1.5, 0.5, 1.1]] * 2)
    logp = ratio.log().requires_grad_()
    mask = torch.ones(2, 3, dtype=torch.bool)
    result = POLICY_LOSSES["ppo"](logp, torch.zeros(2, 3), torch.tensor([2.0, -1.0]), mask, 0.2, 0.3)
    torch.testing.assert_close(result.loss_BT, torch.tensor([[-2.6, -1.0, -2.2], [1.5, 0.8, 1.1]]))
    assert result.clip_fraction.item() == pytest.approx(2 / 6)
    assert result.ratio_mean.item() == pytest.approx(3.1 / 3)
    # d loss / d logp = -A ratio where not clipped, 0 where clipped.
    result.loss_BT.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[0.0, -1.0, -2.2], [1.5, 0.0, 1.1]]))


def test_gspo_by_hand():
    # Row 0: log ratios 0.1, 0.3 -> s = exp(0.2) = 1.2214, above 1.2: clipped at A = 1, so -1.2 on both tokens.
    # Row 1: log ratios 0.2, 0, -0.05 -> s = exp(0.05) = 1.0513; A = -2 gives 2.1025 on all three.
    logp = torch.tensor([[0.1, 0.3, 0.0], [0.2, 0.0, -0.05]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    result = POLICY_LOSSES["gspo"](logp, torch.zeros(2, 3), torch.tensor([1.0, -2.0]), mask, 0.2, 0.2)
    wanted = torch.tensor([[-1.2, -1.2, 0.0], [2 * math.exp(0.05)] * 3])
    torch.testing.assert_close(result.loss_BT, wanted)
    assert result.clip_fraction.item() == pytest.approx(2 / 5)  # counted in tokens
    assert result.ratio_mean.item() == pytest.approx((2 * math.exp(0.2) + 3 * math.exp(0.05)) / 5)


def test_reinforce_by_hand():
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    result = POLICY_LOSSES["reinforce"](logp, logp.detach(), torch.tensor([3.0, -2.0]), mask, 0.0, 0.0)
    torch.testing.assert_close(result.loss_BT, torch.tensor([[3.0, 6.0], [-1.0, 0.0]]))
    assert (result.clip_fraction.item(), result.ratio_mean.item()) == (0.0, 1.0)
    result.loss_BT.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-3.0, -3.0], [2.0, 0.0]]))


def test_gspo_gradient_is_that_of_its_direct_formula():
    logp, old, adv, mask = batch([5, 2, 9, 1], seed=3, spread=0.2)
    step_loss("gspo", "sequence", logp, old, adv, mask, low=0.1, high=0.15).backward()
    direct = logp.detach().double().requires_grad_()
    # GSPO, equation 5: J = 1/N sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|)
    terms = []
    for row, length in enumerate([5, 2, 9, 1]):
        probability = direct[row, :length].sum().exp()
        s = (probability / old[row, :length].double().sum().exp()) ** (1 / length)
        terms.append(torch.minimum(s * adv[row], s.clamp(0.9, 1.15) * adv[row]))
    (-torch.stack(terms).mean()).backward()
    assert (direct.grad.abs().sum(dim=1) > 0).any()
    torch.testing.assert_close(logp.grad.double(), direct.grad, rtol=1e-5, atol=1e-7)


def test_on_policy_all_losses_have_reinforce_s_gradient():
    # At ratio 1 the gradient of ppo is -A per token, as reinforce's; gspo's too once divided by length and N.
    for normaliser in WEIGHTS:
        grads = []
        for name in ("ppo", "reinforce"):
            logp, _, adv, mask = batch([4, 2, 6], seed=1)
            step_loss(name, normaliser, logp, logp.detach(), adv, mask).backward()
            grads.append(logp.grad)
        torch.testing.assert_close(*grads)


def test_parity_with_trl_loss_types():
    # Written out from TRL's documentation of `loss_type`, at ratio 1 so that the per-token loss is -A:
    # lengths 2 and 4, A = 1 and -2. Sums per row: -2 and 8.
    logp, _, _, mask = batch([2, 4], seed=0)
    args = (logp, logp.detach(), torch.tensor([1.0, -2.0]), mask)
    # grpo: mean over rows of (sum / length) = (-1 + 2) / 2
    assert step_loss("ppo", "sequence", *args).item() == pytest.approx(0.5)
    # bnpo, dapo: sum / all tokens = 6 / 6
    assert step_loss("ppo", "token", *args).item() == pytest.approx(1.0)
    # dr_grpo: sum / (rows * max_completion_length) = 6 / (2 * 7)
    assert step_loss("ppo", "constant", *args).item() == pytest.approx(6 / 14)


@pytest.mark.parametrize("normaliser", WEIGHTS)
def test_parity_with_trl_formulas_off_policy(normaliser):
    logp, old, adv, mask = batch([3, 8, 1, 5], seed=11)
    ours = step_loss("ppo", normaliser, logp, old, adv, mask, low=0.2, high=0.28)
    coef = torch.exp(logp - old)
    per_token = -torch.min(coef * adv[:, None], torch.clamp(coef, 1 - 0.2, 1 + 0.28) * adv[:, None])
    keep = mask.float()
    trl = {
        "sequence": ((per_token * keep).sum(-1) / keep.sum(-1).clamp(min=1.0)).mean(),
        "token": (per_token * keep).sum() / keep.sum().clamp(min=1.0),
        "constant": (per_token * keep).sum() / (per_token.size(0) * CONSTANT_LENGTH),
    }
    torch.testing.assert_close(ours, trl[normaliser])
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, logp, retain_graph=True)[0] for loss in (ours, trl[normaliser]))
    )


def test_mwer_is_the_expected_risk_gradient_with_constant_length_1():
    # Prabhavalkar et al. 2018, sampled: 1/G sum_i (W_i - mean W) sum_t grad logp; W = 0, 1, 2 errors, mean 1.
    logp, _, _, mask = batch([2, 3, 1], seed=5)
    policy = POLICY_LOSSES["reinforce"](logp, logp.detach(), torch.tensor([1.0, 0.0, -1.0]), mask, 0.2, 0.2)
    (policy.loss_BT * NORMALISERS["constant"](mask, 6, 3, 1.0)).sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-1 / 3, -1 / 3, 0], [0, 0, 0], [1 / 3, 0, 0]]))


cuts = st.lists(st.integers(0, 9), min_size=2, max_size=7).filter(any)


@settings(deadline=None, max_examples=80)
@given(
    lengths=cuts,
    loss=st.sampled_from(LOSSES),
    normaliser=st.sampled_from(WEIGHTS),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_micro_batches_of_uneven_lengths_sum_to_the_same_loss_and_gradient(lengths, loss, normaliser, seed, data):
    logp, old, adv, mask = batch(lengths, seed)
    totals = count_trained(mask)
    whole = step_loss(loss, normaliser, logp, old, adv, mask)
    (whole_grad,) = torch.autograd.grad(whole, logp)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    parts, sums = [], torch.zeros(2)
    for rows in (order[:cut], order[cut:]):
        width = max(1, max(lengths[row] for row in rows))  # each micro-batch has its own padding
        part = (logp[rows, :width], old[rows, :width], adv[rows], mask[rows, :width])
        parts.append(step_loss(loss, normaliser, *part, totals=totals))
        policy = POLICY_LOSSES[loss](*part, 0.2, 0.2)
        sums += torch.stack([policy.ratio_sum, policy.clipped_sum]).detach()
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(sum(parts), logp)[0], whole_grad, rtol=1e-5, atol=1e-6)
    policy = POLICY_LOSSES[loss](logp, old, adv, mask, 0.2, 0.2)
    torch.testing.assert_close(sums, torch.stack([policy.ratio_sum, policy.clipped_sum]).detach())


def test_mean_of_micro_batch_means_is_another_number():
    # Ratio 1, A = 1 on a row of 1 token and A = -1 on a row of 3. One divisor: (-1 + 3) / 4 = 0.5.
    # Each row as its own micro-batch, averaged: (-1 / 1 + 3 / 3) / 2 = 0. The signal is gone.
    logp, _, _, mask = batch([1, 3], seed=0)
    adv = torch.tensor([1.0, -1.0])
    rows = [(logp[[i]], logp[[i]].detach(), adv[[i]], mask[[i]]) for i in range(2)]
    ours = sum(step_loss("ppo", "token", *row, totals=(4, 2)) for row in rows)
    mean_of_means = sum(step_loss("ppo", "token", *row) for row in rows) / 2
    assert ours.item() == pytest.approx(0.5)
    assert mean_of_means.item() == pytest.approx(0.0)


@pytest.mark.parametrize("junk", [0.0, NAN, float("-inf"), 1e30])
@pytest.mark.parametrize("normaliser", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_padding_never_changes_anything(loss, normaliser, junk):
    lengths = [3, 0, 6]  # the middle row is an abstained one: nothing trained, advantage NaN
    logp, old, adv, mask = batch(lengths, seed=2)
    adv[1] = NAN
    value = step_loss(loss, normaliser, logp, old, adv, mask)
    (grad,) = torch.autograd.grad(value, logp)
    columns = torch.full((3, 4), junk)
    padded = torch.cat([logp.detach().masked_fill(~mask, junk), columns], dim=1).requires_grad_()
    padded_old = torch.cat([old.masked_fill(~mask, junk), columns], dim=1)
    padded_mask = torch.cat([mask, torch.zeros(3, 4, dtype=torch.bool)], dim=1)
    padded_value = step_loss(loss, normaliser, padded, padded_old, adv, padded_mask)
    (padded_grad,) = torch.autograd.grad(padded_value, padded)
    torch.testing.assert_close(padded_value, value)
    torch.testing.assert_close(padded_grad[:, :6], grad)
    assert padded_grad[~padded_mask].abs().sum().item() == 0
    assert math.isfinite(value.item()) and grad.abs().sum().item() > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_huge_log_ratios_stay_finite(loss):
    logp = torch.tensor([[-0.1, -500.0], [-600.0, -0.1]], requires_grad=True)
    old = torch.tensor([[-700.0, -0.1], [-0.1, -800.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    value = step_loss(loss, "token", logp, old, torch.tensor([-1.0, 1.0]), mask)
    value.backward()
    assert math.isfinite(value.item()) and torch.isfinite(logp.grad).all()


def test_bfloat16_logprobs_are_handled_in_float32():
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16)
    result = POLICY_LOSSES["ppo"](logp, logp, torch.tensor([1.0]), torch.ones(1, 2, dtype=torch.bool), 0.2, 0.2)
    assert result.loss_BT.dtype == torch.float32
    assert result.loss_BT.tolist() == [[-1.0, -1.0]]


def test_count_trained_leaves_out_rows_without_tokens():
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    assert count_trained(mask) == (3, 2)
