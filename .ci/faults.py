"""Plants faults in the privacy core, one at a time, and says whether the default tests see them.

    python .ci/faults.py                    # all faults, each against its tests; some minutes
    python .ci/faults.py --only half_noise

A fault is a few characters put into the package, in a copy of the project, behind a text that stands
there once. The first test that fails is printed. The exit status is the number of faults that no
test saw. A text that is no longer there, or twice, ends the script: write the fault again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TESTS = [
    "tests/test_files.py",
    "tests/mechanism",
    "tests/test_secure_noise.py",
    "tests/sampling",
    "tests/accounting",
    "tests/estimators/test_two_points.py",
    "tests/strategies/test_sensitivity.py",
    "tests/strategies/test_units.py",
    "tests/strategies/test_weights.py",
    "tests/strategies/test_edits.py",
    "tests/gradients/test_snapshot.py",
    "tests/gradients/test_loss_graph.py",
    "tests/gradients/test_recording.py",
    "tests/gradients/test_batches.py",
    "tests/gradients/test_traps.py",
    "tests/gradients/test_contract_options.py",
    "tests/gradients/test_contract.py",
    "tests/gradients/test_units.py",
    "tests/isolation/test_comparison.py",
    "tests/isolation/test_schedule.py",
    "tests/isolation/test_state.py",
    "tests/isolation/test_check.py",
    "tests/isolation/test_dry_run.py",
    "tests/isolation/test_findings.py",
    "tests/strategies/test_isolation.py",
    "tests/strategies/test_ends.py",
    "tests/federated/test_contract.py",
    "tests/federated/test_ledger.py",
    "tests/federated/test_local_users.py",
    "tests/federated/test_outliving.py",
    "tests/federated/test_synchronous.py",
    "tests/federated/test_synchronous_sampling.py",
    "tests/test_correlated_noise.py",
    "tests/strategies/test_blocks.py",
    "tests/test_clipping.py",
    "tests/strategies/test_clipping_rules.py",
    "tests/strategies/test_float16.py",
    "tests/test_optimizers.py",
    "tests/report/test_files.py",
]


@dataclass(frozen=True)
class Fault:
    """``added`` is put behind ``text``, which stands once in the files that are named so."""

    name: str
    text: str
    added: str
    file: str = ""


FAULTS = (
    Fault("half_noise", "noise_std = noise_multiplier * total.clip_norm", "/ 2"),
    Fault("twice_the_clip_norm", "factors = (clip_norm", "* 2"),
    Fault("skipped_charge", "self.ledger.charge(event)", "if self.step % 2 == 0 else None"),
    Fault("optimistic_rounding", "room = delta * (1 - 1e-9)", "* 1.1"),
    Fault("one_step_too_many", "return self._remaining >= 1", "or self._remaining == 0"),
    Fault("mean_over_half_the_batch", "Release(self.value.div_(expected_batch_size", "/ 2"),
    Fault("renyi_without_its_logarithm", "(log_delta + np.log(orders)", "* 2"),
    Fault("twice_the_rate_drawn", "rng.binomial(shard_size, sample_rate", "** 0.5"),
    Fault(
        "half_the_rate_charged", "sampled_gaussian(noise_multiplier, sample_rate", "/ 2", "schemes"
    ),
    Fault("limit_not_kept", "if len(drawn) <= self.limit", "* 2"),
    Fault("pushed_out_records_forgotten", "return min(1.0, tail * (1 + 1e-6))", "* 0"),
    Fault("pushed_out_records_count_once", "return self.noise_multiplier / 2", "* 2"),
    Fault(
        "allocated_to_twice_the_steps",
        "RandomAllocationEpoch(noise_multiplier, window.length",
        "* 2",
    ),
    Fault(
        "one_allocation_for_all_epochs",
        "epoch, place = divmod(step - start, steps",
        ")\n            epoch = int(0",
    ),
    Fault("ratios_rounded_down", "upper = np.expm1(np.clip(place - left, 0.0, 1.0) * step)", "* 0"),
    Fault(
        "groups_bounded_by_the_largest",
        "return math.hypot(*self.groups.values()",
        ") * 0 + max(self.groups.values()",
    ),
    Fault("gamma_beside_the_norm", "factors = clip_norm / (_wide(norms)", ") + (0.0"),
    Fault("rule_for_twice_the_norm", "self.clipping.rescale(found, query.clip_norm", "* 2"),
    Fault("count_without_noise", "source.add_normal(value[world.share(len(value)", "- 1"),
    Fault("clip_norm_moves_the_other_way", "change = -self.rate", "* -1"),
    Fault("moved_clip_norm_not_saved", '"clip_norm": self.clip_norm', "and None"),
    Fault("released_norm_not_asked_for", "query = replace(query, clip_norm=self.clip_norm", "/ 2"),
    Fault("loss_scale_of_the_mean", "self._factor = self._scale_of_mean", "/ self._rows"),
    Fault("loss_scale_of_lightning", '{**vars(plugin), "scaler": None', "or plugin.scaler"),
    Fault("half_the_noise_subtracted", "return self.covariance[-1][-1]", "/ 2"),
    Fault(
        "clip_after_the_sum",
        "clip_factors_and_unit(gradients.norms()",
        "* 0 + gradients.norms().mean()",
    ),
    Fault("noise_on_other_ranks_only", "if noise_std > 0 and not has_begun", "and world.rank"),
    Fault("counted_gradients_not_clipped", "self._factors = clip_factors(norms, clip_norm", "* 2"),
    Fault("non_finite_records_count", "factors.nan_to_num_(nan=0.0", "+ 1.0"),
    Fault("noise_drawn_ahead_serves_twice", "self._unused -= size", "* 0"),
    Fault(
        "charge_in_memory_only",
        'self._next_number("charge")\n        if self._journal is not None',
        "and False",
    ),
    Fault(
        "begun_round_not_waited_for",
        "file.write(_line_of(progress, {}))\n        file.flush()\n        os.fsync(file.fileno()",
        ") if False else (0",
    ),
    Fault("smaller_budget_goes_on", "target < promised.epsilon", "* 0"),
    Fault("order_chosen_again", "return RDPGuard(*budget, expected, self.order", "and None"),
    Fault("weaker_queries_pass", "if not together >= least", "/ 2"),
    Fault("clamped_losses_pass", '(_MOVES | _NLL) | _names("Add Sub Rsub', 'Clamp "  "'),
    Fault("spot_checks_compare_nothing", "return torch.maximum(moved, apart)", "* 0"),
    Fault("sum_not_compared", "moved: Tensor = (before.total - after.total).norm()", "* 0"),
    Fault("kept_for_the_whole_batch", "(before.total - after.total).norm() * (n / k)", "* (k / n)"),
    Fault("any_coupling_is_an_order", "if ordered < math.inf", "or True"),
    Fault("settled_from_another_state", "self.begin.restore()", "if 0 else None"),
    Fault("own_generators_not_seen", 'own = any(each.kind == "random"', "and False"),
    Fault("versions_not_read", "-1 if tensor.is_inference() else tensor._version", "* 0"),
    Fault("frozen_weights_not_restored", "() if parameters else _frozen(module)", "[:0]"),
    Fault("settings_not_in_snapshots", "in enumerate(optimizer.param_groups", "[:0]", "snapshot"),
    Fault("forked_processes_write", "if os.getpid() != self._process", "and False", "journal"),
    Fault("forked_processes_release", "if os.getpid() != self._process", "and False", "step"),
    Fault("orderly_ends_replanned", "any(plan.is_ended for plan in plans)", "and False"),
    Fault("older_checkpoints_replanned", "plans[0].saved <= made", "* 0"),
    Fault("budget_under_its_own_relation", "yield claim.costs(relation", "and document.relation"),
    Fault("early_steps_left_out", "if step in _EARLY", "and 0"),
    Fault(
        "two_steps_without_hooks",
        "getattr(module, name)(*given.get(name, ()))",
        "if 0 else None",
    ),
    Fault("passes_leave_traces", "part.fill(part.content)", "if 0 else None"),
    Fault("gradients_of_passes_stay", "param.grad = gradient", "or param.grad", "snapshot"),
    Fault("twins_not_in_place", "_moved(now.value_at(path), twin, scale))", " if 0 else None"),
    Fault("thresholds_seem_public", "for scale in (1.0, _FAR, -_FAR)", "[:1]"),
    Fault("marks_of_nothing", "if self._marks == earlier._marks", "or True"),
    Fault("uses_not_counted", "if uses[id(param)] != recorded[id(param)]", "and False"),
    Fault("overwritten_inputs_pass", "list(map(_VERSION, inputs)) == self._versions", "or True"),
    Fault(
        "rows_in_another_order_pass",
        "if any(map(self._changes_order, graph.choosing)) and all(c.folding is None for c in calls)",
        "and False",
    ),
    Fault("missing_tap", "if call in waiting", "and call.rule is copied"),
    Fault(
        "a_part_counted_twice",
        "self._of[id(tensor)].add(use, combined=self._combined)",
        "or self._of[id(tensor)].add(use, combined=self._combined)",
    ),
    Fault("one_mask_for_all_records", '_vmap_increment_nesting(n, "different"', '[:0] + "same"'),
    Fault("kept_tensors_pass", "if (left := each()) is not None", "and False"),
    Fault("mean_over_twice_the_targets", "counts = counts.view(recorder.n, -1).sum(1)", "* 2"),
    Fault("twice_the_scale_of_attention", "query, key, value = batch(query)", "* 2"),
    Fault("taps_on_views", "if out._is_view()", "and False"),
    Fault("a_size_taken_for_records", "_length(of_three)) == (2, 3)", "or True"),
    Fault(
        "edited_gradients_pass", "return not is_same or bool(self._marks.written())", "and False"
    ),
    Fault(
        "replaced_gradients_pass",
        "is_same = _are_the_same(self._gradients(), self._released)",
        "or True",
    ),
    Fault(
        "separation_not_enforced",
        "part = parts[step % self.bands]",
        "if 0 else np.arange(shard_size)",
    ),
    Fault("order_drawn_anew", "place = step % passes", "if step < 12 else (step * 7) % passes"),
    Fault("cost_of_one_column", "min(use, passes - 1)", "* 0"),
    Fault("cost_of_the_first_use", "fading ** (use + 1", "- use"),
    Fault("half_the_rate_of_a_round", "min(1.0, self.bands * sample_rate", "/ 2", "blocks"),
    Fault("two_steps_unpaid", "self.covered = event.num_steps - 1", "+ 2"),
    Fault("column_norm_left_out", "std * self._column_norm", "** 0"),
    Fault("nothing_remembered", "self._correlate(fresh, self._past", "[:0]"),
    Fault(
        "memory_in_checkpoints",
        '"step": self.step,',
        '"past": [*getattr(self.noise, "_past", ())],',
        "mechanism",
    ),
    Fault(
        "fixed_order_as_add_remove",
        'no_bound: ClassVar[Mapping[str, str]] = {\n        "add_remove',
        "?",
    ),
    Fault("written_weights_pass", "(places := before.written()", "[:0]"),
    Fault("steps_left_out_pass", "is_fault = self._usual is not None", "and False"),
    Fault(
        "edited_moments_pass",
        "|= any(now.get(id(each)) != version for each, version in before)",
        "and False",
    ),
    Fault("constant_losses_pass", "not bool((first.norms > _NOTHING).any())", "and False"),
    Fault("norms_not_judged", "before.norms.clamp(min=1.0)).sum().abs() * (n / k)", " * 0"),
    Fault("a_rule_that_reads_is_public", "return stops(_unreadable(reads))", " or True  #"),
    Fault("callbacks_mix_records", "not (is_same or self._step.one_record)", "and False"),
    Fault("stops_by_state_are_public", "self._world(self._ever, sign * _FAR", " * 0"),
    Fault(
        "weights_of_hooks_saved",
        "names = self._changed | self._open_weights()",
        " - self._open_weights()",
    ),
    Fault(
        "writes_of_callbacks_cleared",
        "self._cleared |= check.same_in_both",
        " | self._written_since()",
    ),
    Fault(
        "nothing_exchanged",
        "found[place] = _like(samples[place], samples[kept[given % len(kept)]])",
        "if 0 else samples[place]",
    ),
    Fault("updates_applied_twice", "if i < self._applied[client]", "- 1", "asynchronous"),
    Fault(
        "mean_over_who_answered", "self.plan.rate(self._driver.step) * self.num_records", "* 0.9"
    ),
    Fault("any_norm_passes", "clip_norm * records + noise", "* 1e9", "protocol"),
    Fault("honest_norms_refused", "clip_norm * records + noise", "* 0", "protocol"),
    Fault("no_quorum_is_needed", "self._counts[self._round] >= self._least", "* 0"),
    Fault("who_is_not_drawn_counts", "client in self._drawn", "or True"),
    Fault(
        "who_is_not_drawn_is_not_asked",
        "staying - (self._answered | self._missed)",
        "& self._drawn",
    ),
    Fault("draws_are_saved", '"missed": sorted(self._missed),', '"drawn": sorted(self._drawn),'),
    Fault("clients_charged_at_half_the_rate", "plan.noise_multiplier(t), self.rate", "/ 2"),
    Fault(
        "a_lost_ledger_of_clients_passes",
        "count for run, count in self._charges.items()",
        "if False",
    ),
    Fault("a_step_has_two_releases", "self._place[0], 1, make", ", keep=False"),
    Fault("a_missed_query_is_asked", "staying - (self._answered | self._missed", "- self._missed"),
    Fault(
        "rows_clipped_instead_of_users",
        "self.pending.append(chunk",
        "if not owners else Chunk(position + offset, len(records), first, rate, step, last, records)",
    ),
    Fault("all_rows_of_a_user_read", "if len(own) <= self.most_rows", "or True"),
    Fault(
        "users_of_a_client_counted_by_rows", "self._loader.dataset if self.users is None", "or True"
    ),
    Fault("workers_share_records", "if (found, workers) != (size, lead)", "and False"),
    Fault(
        "later_passes_not_counted",
        "if are_several and next(self._iterator, _END) is not _END",
        "and False",
    ),
    Fault("wrong_passes_seen_late", "look=not chunk.index)) is not None", "and batch_idx == 0"),
    Fault("ids_of_nothing_pass", "if any(copy.deepcopy(each) not in known", "and False"),
    Fault(
        "orders_among_no_copies",
        "runs.append(self._run(others, range(len(others))))",
        " if False else None",
    ),
    Fault("longest_at_the_end", "longer if i == count // 2", "* 0 + count - 1"),
    Fault("sums_of_views_for_their_mean", "(self.records * self.counts.double()", "** 0"),
    Fault("secure_releases_not_rounded", "if not self.is_secure or not std > 0", "or True"),
    Fault("secure_sums_in_float32", "return torch.float64 if self.is_secure", "and False"),
)

SEEN_BY = {  # the file that is tried first
    "tests/accounting/test_accountants.py": "optimistic_rounding renyi_without_its_logarithm",
    "tests/accounting/test_guards.py": (
        "one_step_too_many smaller_budget_goes_on order_chosen_again"
    ),
    "tests/accounting/test_journal.py": "forked_processes_write",
    "tests/accounting/test_ledger.py": (
        "charge_in_memory_only orderly_ends_replanned older_checkpoints_replanned"
    ),
    "tests/federated/test_contract.py": "mean_over_who_answered",
    "tests/federated/test_ledger.py": "begun_round_not_waited_for",
    "tests/federated/test_local_users.py": "users_of_a_client_counted_by_rows longest_at_the_end",
    "tests/federated/test_outliving.py": "updates_applied_twice no_quorum_is_needed",
    "tests/federated/test_synchronous.py": (
        "any_norm_passes honest_norms_refused a_missed_query_is_asked"
    ),
    "tests/federated/test_synchronous_sampling.py": (
        "who_is_not_drawn_counts who_is_not_drawn_is_not_asked draws_are_saved "
        "clients_charged_at_half_the_rate a_step_has_two_releases a_lost_ledger_of_clients_passes"
    ),
    "tests/gradients/test_batches.py": "a_size_taken_for_records",
    "tests/gradients/test_contract.py": "a_part_counted_twice mean_over_twice_the_targets",
    "tests/gradients/test_contract_options.py": (
        "one_mask_for_all_records twice_the_scale_of_attention"
    ),
    "tests/gradients/test_loss_graph.py": "clamped_losses_pass",
    "tests/gradients/test_recording.py": (
        "uses_not_counted overwritten_inputs_pass rows_in_another_order_pass"
    ),
    "tests/gradients/test_traps.py": "missing_tap kept_tensors_pass taps_on_views",
    "tests/isolation/test_check.py": (
        "any_coupling_is_an_order orders_among_no_copies own_generators_not_seen "
        "frozen_weights_not_restored two_steps_without_hooks"
    ),
    "tests/isolation/test_comparison.py": (
        "spot_checks_compare_nothing sum_not_compared kept_for_the_whole_batch "
        "norms_not_judged nothing_exchanged"
    ),
    "tests/isolation/test_dry_run.py": "constant_losses_pass",
    "tests/isolation/test_findings.py": "forked_processes_release callbacks_mix_records",
    "tests/isolation/test_schedule.py": "early_steps_left_out",
    "tests/isolation/test_state.py": (
        "versions_not_read twins_not_in_place thresholds_seem_public marks_of_nothing"
    ),
    "tests/mechanism/test_mechanism.py": (
        "half_noise mean_over_half_the_batch clip_after_the_sum noise_on_other_ranks_only "
        "weaker_queries_pass"
    ),
    "tests/sampling/test_allocation.py": (
        "allocated_to_twice_the_steps one_allocation_for_all_epochs ratios_rounded_down"
    ),
    "tests/sampling/test_blocks.py": "separation_not_enforced order_drawn_anew",
    "tests/sampling/test_schemes.py": "twice_the_rate_drawn half_the_rate_charged",
    "tests/sampling/test_user_level.py": "ids_of_nothing_pass",
    "tests/sampling/test_truncated.py": (
        "limit_not_kept pushed_out_records_forgotten pushed_out_records_count_once"
    ),
    "tests/strategies/test_blocks.py": (
        "half_the_rate_of_a_round two_steps_unpaid column_norm_left_out nothing_remembered "
        "memory_in_checkpoints fixed_order_as_add_remove workers_share_records later_passes_not_counted "
        "wrong_passes_seen_late"
    ),
    "tests/strategies/test_clipping_rules.py": (
        "rule_for_twice_the_norm count_without_noise clip_norm_moves_the_other_way "
        "moved_clip_norm_not_saved released_norm_not_asked_for counted_gradients_not_clipped"
    ),
    "tests/strategies/test_edits.py": (
        "edited_gradients_pass replaced_gradients_pass steps_left_out_pass edited_moments_pass"
    ),
    "tests/strategies/test_float16.py": "loss_scale_of_the_mean loss_scale_of_lightning",
    "tests/strategies/test_isolation.py": (
        "settled_from_another_state weights_of_hooks_saved writes_of_callbacks_cleared"
    ),
    "tests/strategies/test_ends.py": ("a_rule_that_reads_is_public stops_by_state_are_public"),
    "tests/strategies/test_units.py": (
        "skipped_charge rows_clipped_instead_of_users all_rows_of_a_user_read "
        "sums_of_views_for_their_mean"
    ),
    "tests/strategies/test_weights.py": "written_weights_pass",
    "tests/test_clipping.py": "groups_bounded_by_the_largest gamma_beside_the_norm",
    "tests/test_correlated_noise.py": "cost_of_one_column cost_of_the_first_use",
    "tests/test_functional.py": "twice_the_clip_norm non_finite_records_count",
    "tests/gradients/test_snapshot.py": (
        "settings_not_in_snapshots passes_leave_traces gradients_of_passes_stay"
    ),
    "tests/test_optimizers.py": "half_the_noise_subtracted",
    "tests/test_secure_noise.py": (
        "noise_drawn_ahead_serves_twice secure_releases_not_rounded secure_sums_in_float32"
    ),
}


def package_file(root: Path, fault: Fault) -> Path:
    paths = [p for folder in ("lightning_dp", "callbacks") for p in (root / folder).rglob("*.py")]
    found = [
        path for path in paths if fault.file in path.name and fault.text in path.read_text("utf-8")
    ]
    count = sum(path.read_text(encoding="utf-8").count(fault.text) for path in found)
    if count != 1:
        sys.exit(f"{fault.name}: {fault.text!r} stands {count} times in the package, not once.")
    return found[0]


def planted(fault: Fault, scratch: Path, tests: list[str]) -> str:
    """The first test that fails, or "" if none does."""
    root = scratch / fault.name
    keep = shutil.ignore_patterns(
        ".git", "__pycache__", "venv", ".venv", "*.egg-info", "build", ".mypy_cache"
    )
    shutil.copytree(ROOT, root, symlinks=True, ignore=keep)
    path = package_file(root, fault)
    text = path.read_text(encoding="utf-8")
    text = text.replace(fault.text, f"{fault.text} {fault.added}")
    compile(text, str(path), "exec")  # what is no Python would be seen by any test
    path.write_text(text, encoding="utf-8")
    first = [file for file, names in SEEN_BY.items() if fault.name in names.split()]
    parts = [first, tests] if first and tests == TESTS else [tests]
    seen = next(filter(None, (first_failed(root, part) for part in parts)), "")
    shutil.rmtree(root)
    return seen


def first_failed(root: Path, tests: list[str]) -> str:
    """The first of these tests that fails in a copy of the project, or "" if none does."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    if done.returncode == 0:
        return ""
    if done.returncode not in (1, 2):  # pytest's numbers for tests and for files that failed
        sys.exit(f"pytest {' '.join(tests)} ran no test: {done.stdout}{done.stderr}")
    return failed.group(1) if failed else f"exit {done.returncode}: {done.stdout[-300:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults, one at a time.")
    parser.add_argument("--only", choices=[fault.name for fault in FAULTS])
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest runs")
    chosen = parser.parse_args()
    faults = [fault for fault in FAULTS if chosen.only in (None, fault.name)]
    unseen = 0
    with tempfile.TemporaryDirectory() as scratch:
        for fault in faults:
            begin = time.perf_counter()
            seen = planted(fault, Path(scratch), list(chosen.tests))
            unseen += not seen
            seconds = time.perf_counter() - begin
            print(f"{fault.name:32} {seconds:4.0f} s  {seen or 'NOT SEEN'}", flush=True)
    print(f"{len(faults) - unseen} of {len(faults)} faults were seen.")
    sys.exit(unseen)


if __name__ == "__main__":
    main()
