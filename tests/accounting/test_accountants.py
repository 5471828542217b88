"""One contract for every accountant; each implementation inherits all of it."""

import math

import pytest
from opacus_accountants import OpacusPRVAccountant, OpacusRDPAccountant

from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian, StreamingRDPAccountant
from lightning_dp.accounting.base import CachedAccountant
from lightning_dp.accounting.events import PoissonRound

HISTORY = [(PoissonGaussian(1.1, 0.02), 150), (PoissonGaussian(0.9, 0.01), 200)]


@pytest.fixture(scope="module")
def bracket(oracle):
    """Lower and upper bounds of dp_accounting for HISTORY."""
    pairs = [(event.pair, count) for event, count in HISTORY]
    return [
        oracle.dp_accounting_epsilons([1e-5], pairs, 1e-4, pessimistic=pessimistic)[0]
        for pessimistic in (False, True)
    ]


class AccountantContract:
    """What `AbstractAccountant` promises."""

    accountant = None
    noise = 0.0  # relative error that the accountant may make either way
    poisson_replace_one = True

    def epsilon(self, history, delta=1e-5, relation="add_remove"):
        return self.accountant.epsilon(history, delta, relation)

    def test_name_is_not_empty(self):
        assert self.accountant.name

    def test_nothing_costs_nothing(self):
        for history in ([], [(Gaussian(1.0), 0)]):
            assert self.epsilon(history) == 0.0
            assert self.accountant.delta(history, 1.0) == 0.0

    @pytest.mark.parametrize("event", [Gaussian(0.0), PoissonGaussian(0.0, 0.01)])
    def test_no_noise_is_no_privacy(self, event):
        assert self.epsilon([*HISTORY, (event, 1)]) == math.inf
        assert self.accountant.delta([*HISTORY, (event, 1)], 1.0) == 1.0

    def test_never_below_the_lower_oracle_nor_far_above_the_upper(self, bracket):
        low, high = bracket
        assert low < self.epsilon(HISTORY) < high * 1.35

    def test_full_batch_is_never_below_gdp(self):
        # Second oracle: Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu) = 1e-5 at mu = 1.
        assert 4.37717 <= self.epsilon([(Gaussian(2.0), 4)]) < 4.37717 * 1.15

    @pytest.mark.parametrize("z", [0.6, 0.8, 1.0, 1.5, 3.0])
    def test_more_noise_costs_less(self, z):
        less = self.epsilon([(PoissonGaussian(z, 0.02), 100)])
        assert self.epsilon([(PoissonGaussian(1.1 * z, 0.02), 100)]) <= less * (1 + self.noise)

    def test_larger_sample_rate_costs_more(self):
        costs = [self.epsilon([(PoissonGaussian(1.0, q), 100)]) for q in (0.01, 0.02, 0.1, 0.5)]
        assert costs == sorted(costs)

    def test_more_steps_cost_more(self):
        costs = [self.epsilon([(PoissonGaussian(1.0, 0.02), n)]) for n in (1, 10, 20, 200, 2000)]
        assert costs == sorted(costs) and costs[-1] > 2 * costs[0]

    def test_smaller_delta_costs_more(self):
        costs = [self.epsilon(HISTORY, delta) for delta in (1e-3, 1e-5, 1e-7)]
        assert costs == sorted(costs)

    def test_larger_epsilon_has_smaller_delta(self):
        deltas = [self.accountant.delta(HISTORY, epsilon) for epsilon in (0.5, 1.0, 1.5)]
        assert deltas == sorted(deltas, reverse=True)

    def test_a_count_is_so_many_events(self):
        event = PoissonGaussian(1.0, 0.02)
        assert self.epsilon([(event, 7)]) == self.epsilon([(event, 1)] * 7)
        assert self.epsilon([(event, 3), (event, 4)]) == self.epsilon([(event, 7)])

    def test_order_is_irrelevant(self):
        assert self.epsilon(HISTORY) == self.epsilon(HISTORY[::-1])

    def test_round_counts_as_its_pair(self):
        round_ = PoissonRound((2.0, 2.0, 2.0, 2.0), 0.02)
        single = PoissonGaussian(1.0, 0.02)
        assert self.epsilon([(round_, 50)]) == self.epsilon([(single, 50)])

    def test_delta_inverts_epsilon(self):
        epsilon = self.epsilon(HISTORY)
        assert self.accountant.delta(HISTORY, epsilon) == pytest.approx(1e-5, rel=0.05)

    def test_replacement_doubles_the_sensitivity(self):
        assert self.epsilon([(Gaussian(2.0), 4)], relation="replace_one") == pytest.approx(
            self.epsilon([(Gaussian(1.0), 4)])
        )

    def test_replacement_costs_more_than_removal_and_less_than_two_removals(self):
        if not self.poisson_replace_one:
            with pytest.raises(ValueError, match="use PLDAccountant"):
                self.epsilon(HISTORY, relation="replace_one")
            return
        assert (
            self.epsilon(HISTORY)
            < self.epsilon(HISTORY, relation="replace_one")
            < self.epsilon(
                [(PoissonGaussian(1.1 / 2, 0.02), 150), (PoissonGaussian(0.45, 0.01), 200)]
            )
        )

    def test_results_are_python_floats(self):
        assert type(self.epsilon(HISTORY)) is float
        assert type(self.accountant.delta(HISTORY, 1.0)) is float

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
    def test_illegal_delta_is_refused(self, delta):
        with pytest.raises(ValueError, match="delta must be"):
            self.epsilon(HISTORY, delta)

    @pytest.mark.parametrize("epsilon", [-1.0, math.nan, math.inf])
    def test_illegal_epsilon_is_refused(self, epsilon):
        with pytest.raises(ValueError, match="epsilon must be"):
            self.accountant.delta(HISTORY, epsilon)

    @pytest.mark.parametrize("count", [-1, 1.5, math.nan, True, None])
    def test_illegal_count_is_refused(self, count):
        with pytest.raises(ValueError, match="count must be"):
            self.epsilon([(Gaussian(1.0), count)])

    @pytest.mark.parametrize("entry", [Gaussian(1.0), (1.0, 2), "ab", (Gaussian(1.0),)])
    def test_illegal_history_is_refused(self, entry):
        with pytest.raises(ValueError, match="pairs \\(event, count\\)"):
            self.epsilon([entry])

    def test_unknown_relation_is_refused(self):
        with pytest.raises(ValueError, match="relation must be"):
            self.epsilon(HISTORY, relation="zero_out")


class TestCached(AccountantContract):
    accountant = CachedAccountant(PLDAccountant())  # one for all: no answer is taken for another


class TestPLD(AccountantContract):
    accountant = PLDAccountant()


class TestStreamingRDP(AccountantContract):
    accountant = StreamingRDPAccountant()


@pytest.mark.slow  # a tool of comparison
@pytest.mark.filterwarnings("ignore:Optimal order is")
class TestOpacusRDP(AccountantContract):
    accountant = OpacusRDPAccountant()
    poisson_replace_one = False


@pytest.mark.slow  # a tool of comparison
@pytest.mark.filterwarnings("ignore:divide by zero")
class TestOpacusPRV(AccountantContract):
    accountant = OpacusPRVAccountant(eps_error=0.05)
    noise = 0.1
    poisson_replace_one = False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rtol": 0.0}, "rtol"),
        ({"rtol": math.nan}, "rtol"),
        ({"spacing": 0.0}, "spacing"),
        ({"spacing": 2.0}, "spacing"),
    ],
)
def test_illegal_accuracy_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PLDAccountant(**arguments)
