"""KL estimators, entropy and the sampler/trainer gap. Shapes: V vocabulary, B rows, T tokens."""

import math

import pytest
import torch

from speechrl.algorithms.gap import finish, logprob_gap, merge
from speechrl.algorithms.kl import KL_ESTIMATORS, entropy, masked_kl

LN2 = math.log(2)


def test_by_hand():
    # The policy gives the token 1/2 and the reference 1/4: d = ln 2. Then k3 = exp(-ln 2) - 1 + ln 2 = ln 2 - 1/2.
    # And the other way round: d = -ln 2, k3 = 2 - 1 - ln 2 = 1 - ln 2.
    logp, ref = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    assert KL_ESTIMATORS["k1"](logp, ref).tolist()[0] == pytest.approx([LN2, -LN2])
    assert KL_ESTIMATORS["k2"](logp, ref).tolist()[0] == pytest.approx([LN2**2 / 2] * 2)
    assert KL_ESTIMATORS["k3"](logp, ref).tolist()[0] == pytest.approx([LN2 - 0.5, 1 - LN2])


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_zero_when_equal_and_small_differences_keep_their_digits(name):
    logp = torch.tensor([[-5.0, -0.1]])
    assert KL_ESTIMATORS[name](logp, logp).tolist() == [[0.0, 0.0]]
    # k2 = 5e-9; k3 = d^2 / 2 - d^3 / 6 = 4.9998e-9, which exp(x) - 1 - x in float32 would round to 0 or 1e-7.
    wanted = {"k1": 1e-4, "k2": 5e-9, "k3": 4.99983e-9}[name]
    zero = torch.zeros(1, 1)
    assert KL_ESTIMATORS[name](zero, zero - 1e-4).item() == pytest.approx(wanted, rel=1e-2)


def expectations(name: str) -> tuple[float, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """By enumeration of a vocabulary of 4: value and gradient of the estimator, both KL gradients, the KL."""
    logits_V = torch.tensor([0.3, -1.0, 1.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref_V = torch.log_softmax(torch.tensor([1.0, 0.5, -0.2, 0.0], dtype=torch.float64), dim=0)
    logp_V = torch.log_softmax(logits_V, dim=0)
    prob_V = logp_V.exp().detach()  # tokens are drawn, so no gradient goes through their probability
    expected = (prob_V * KL_ESTIMATORS[name](logp_V, ref_V)).sum()
    kl = (logp_V.exp() * (logp_V - ref_V)).sum()
    other_kl = (ref_V.exp() * (ref_V - logp_V)).sum()
    grads = [torch.autograd.grad(value, logits_V, retain_graph=True)[0] for value in (expected, kl, other_kl)]
    return expected.item(), *grads, kl.item()


def test_values_in_expectation():
    for name in ("k1", "k3"):
        value, _, _, _, kl = expectations(name)
        assert value == pytest.approx(kl, rel=1e-12)
    assert abs(expectations("k2")[0] - expectations("k2")[4]) > 1e-3


def test_gradients_in_expectation_say_which_fit_as_a_loss():
    zero_V = torch.zeros(4, dtype=torch.float64)
    _, k1_V, kl_V, other_kl_V, _ = expectations("k1")
    torch.testing.assert_close(k1_V, zero_V, rtol=0, atol=1e-12)
    torch.testing.assert_close(expectations("k2")[1], kl_V)
    torch.testing.assert_close(expectations("k3")[1], other_kl_V)
    assert (kl_V - other_kl_V).abs().max().item() > 0.01


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
@pytest.mark.parametrize("junk", [float("nan"), float("-inf")])
def test_padding_never_poisons(name, junk):
    logp = torch.tensor([[-1.0, -2.0, junk]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, junk]])
    mask = torch.tensor([[True, True, False]])
    kl_BT = masked_kl(name, logp, ref, mask)
    kl_BT.sum().backward()
    torch.testing.assert_close(kl_BT[:, :2], KL_ESTIMATORS[name](logp[:, :2], ref[:, :2]))
    assert kl_BT[0, 2].item() == 0
    assert logp.grad[0, 2].item() == 0
    assert torch.isfinite(logp.grad).all()


def test_k3_of_impossible_tokens_is_finite():
    logp = torch.tensor([[-900.0]], requires_grad=True)
    kl = KL_ESTIMATORS["k3"](logp, torch.tensor([[-0.1]]))
    kl.sum().backward()
    assert kl.item() == pytest.approx(math.exp(20) - 21, rel=1e-6)  # d clamped to -20
    assert logp.grad.item() == 0


def test_entropy_by_hand():
    # Uniform over 4: ln 4. Probabilities 1/2, 1/4, 1/4 and one banned token: 1.5 ln 2.
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [LN2, 0.0, 0.0, float("-inf")]])
    assert entropy(logits).tolist() == pytest.approx([math.log(4), 1.5 * LN2])


def test_gap_by_hand():
    # Differences trainer - sampler: 0.1, -0.3 | 0.2, the rest is padding.
    # abs mean = 0.6 / 3 = 0.2; k3 of sampler || trainer = exp(x) - 1 - x: 0.0051709, 0.0408182, 0.0214028, whose mean
    # is 0.0224640
    sampler = torch.tensor([[-1.0, -2.0, float("nan")], [-3.0, 7.0, 7.0]], dtype=torch.float64)
    trainer = torch.tensor([[-0.9, -2.3, 5.0], [-2.8, 0.0, float("nan")]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    whole = logprob_gap(trainer, sampler, mask)
    metrics = finish(whole)
    assert metrics["gap/abs_mean_nats"] == pytest.approx(0.2)
    assert metrics["gap/abs_max_nats"] == pytest.approx(0.3)
    assert metrics["gap/kl_nats"] == pytest.approx(0.0224640, abs=1e-7)
    # The rows on two ranks, merged, are the same; a rank without tokens changes nothing.
    parts = [logprob_gap(trainer[[i]], sampler[[i]], mask[[i]]) for i in range(2)]
    empty = logprob_gap(trainer, sampler, torch.zeros_like(mask))
    assert finish(merge([*parts, empty])) == pytest.approx(metrics)
    assert finish(empty) == {}
