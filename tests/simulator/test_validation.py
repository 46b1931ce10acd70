"""`distlab validate`: scores, the fit of constants, and that published tables are derived as they are printed."""

import json
import math
import tomllib
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from distlab.cli import main
from simulator import stack
from simulator.validation import report
from simulator.validation.case import read_table
from simulator.validation.confidence import Like, error_of, errors_from, like_of, words_on_plans
from simulator.validation.exact import Derived
from simulator.validation.plan_rows import PLAN_FAMILIES, plan_cases
from simulator.validation.refit import CONSTANTS, fit_stack, leave_out, measure_slopes
from simulator.validation.report import kendall_tau, score
from simulator.validation.steps import zero_bubble

TABLES = cache(report.derived)


@pytest.fixture
def few(monkeypatch):
    """Two cases of one stack and a table that was never fitted to, so that a run takes a second."""
    cases = [case for case in zero_bubble() if case.label.endswith("m=24")][:2]
    never, seen = plan_cases("torchtune")
    cases += [never, replace(seen, family="torchtune, seen")]
    monkeypatch.setattr(report, "all_cases", lambda: cases)
    monkeypatch.setattr(report, "derived", TABLES)
    monkeypatch.setattr(report, "FITTED", {"megatron": ("matmul_fraction",)})
    return cases


def test_errors_biases_and_choices():
    found = score([1.1, 1.9, 3.0, 4.0], [1.0, 2.0, 3.0, 5.0], ["a", "a", "", ""])
    assert (found.error, found.bias) == pytest.approx(((0.1 + 0.05 + 0.2) / 4, (0.1 - 0.05 - 0.2) / 4))
    assert found.tau == 1
    assert (found.choices, found.choice_cost, found.choice_tau) == (1, 0, 1)
    wrong = score([2.0, 1.0, 3.0], [1.0, 1.5, 2.0], ["a", "a", "a"])
    assert (wrong.choice_cost, wrong.choice_tau) == (pytest.approx(0.5), pytest.approx(1 / 3))
    known = [([1, 2, 3], [6, 5, 4], -1), ([1, 1, 2], [1, 2, 3], 2 / 6**0.5), ([1, 1], [1, 2], None)]
    for one, other, tau in known:  # ties count for neither order
        assert kendall_tau(one, other) == (tau if tau is None else pytest.approx(tau))


def test_a_fit_finds_the_constants_that_made_the_times():
    """Times that a known stack gives are fitted from a wrong start; they say nothing of constants left alone."""
    true = replace(stack("megatron"), matmul_fraction=0.7, memory_fraction=0.5)
    cases = [replace(case, measured_s=case.predict_s(true)) for case in list(zero_bubble())[::3]]
    found = fit_stack(cases, stack("megatron"), [CONSTANTS["matmul_fraction"], CONSTANTS["memory_fraction"]])
    assert found.matmul_fraction == pytest.approx(0.7, rel=0.02)
    assert (found.memory_fraction, found.kernel_s) == (pytest.approx(0.5, rel=0.02), true.kernel_s)
    cases = [replace(case, measured_s=case.measured_s / 10) for case in cases[:2]]
    found = fit_stack(cases, stack("megatron"), [CONSTANTS["matmul_fraction"], CONSTANTS["kernel_s"]])
    assert (found.matmul_fraction, found.kernel_s) == (CONSTANTS["matmul_fraction"].high, 0)  # in their bounds


def test_a_row_is_predicted_without_its_structure():
    """A structure whose times are doubled moves the constants of others, and not its own."""
    cases = [case for case in zero_bubble() if case.label.endswith(("m=24", "m=32"))]
    constants = [CONSTANTS["matmul_fraction"]]
    doubled = [replace(case, measured_s=2 * case.measured_s) if "1.5B 1F1B" in case.label else case for case in cases]
    before, after = (leave_out(each, stack("megatron"), constants) for each in (cases, doubled))
    assert all(map(math.isnan, before[1]))  # no second table has the stack
    for case, one, other in zip(cases, before[0], after[0], strict=True):
        if "1.5B 1F1B" in case.label:
            assert one == pytest.approx(other, rel=1e-12)
    assert before[0] != after[0]
    apart = [replace(case, family=case.label) for case in cases]
    assert leave_out(apart, stack("megatron"), constants)[1][0] != before[0][0]
    more = [*cases, *(replace(case, family="other") for case in cases[:3])]  # families count alike
    weights = measure_slopes(more, stack("megatron"), constants).weights
    assert [np.sum(each**2) for each in (weights[:-3], weights[-3:])] == pytest.approx([1, 1])


def test_validate_prints_scores_and_json(few, capsys, tmp_path):
    page = tmp_path / "new" / "page.md"
    assert main(["validate", "--json", "--page", str(page)]) == 0
    written = capsys.readouterr()
    assert f"--page {page}: made the folder {page.parent}\n" in written.err
    families = json.loads(written.out)["families"]
    own = families["zero-bubble"]
    assert set(own["scores"]) == {*report.MODES} - {"family left out"}
    never, seen = (list(families[name]["scores"]) for name in ("torchtune", "torchtune, seen"))
    assert (never, seen) == (["family left out"], ["calibrated"])
    assert own["scores"]["calibrated"]["error"] < own["scores"]["data sheet"]["error"]
    assert sum(len(each["rows"]) for each in families.values()) == len(few)
    text = page.read_text()
    for words in ("![Predicted against measured", "zero-bubble: ", "Chosen after the errors were seen", "and not used"):
        assert words in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert main(["validate"]) == 0
    assert "zero-bubble Table 5" in capsys.readouterr().out
    assert main(["validate", "--refit"]) == 0
    assert "megatron: matmul_fraction = 0." in capsys.readouterr().out


def test_memory_and_collectives_are_judged_too():
    def row(table, predicted):
        return {table: [Derived(table, "row", predicted, 1.0)]}

    tables = row("a, GiB", 1.03) | row("b, GiB", 1.01) | row("days", 2.0)
    tables |= row("all-reduce, c, us, smaller", 1.06) | row("all-reduce, c, us, from 64 MiB", 1.06)
    collectives = "all-reduce, c, us, from 64 MiB: falls short: error 6.0% > 4%"
    assert report.short_tables(tables) == ["a, GiB: falls short: error 3.0% > 2%", collectives]


def test_every_table_has_rows_and_says_where_they_are_from():
    for path in resources.files("simulator.validation").joinpath("tables").iterdir():
        rows = read_table(path.name.removesuffix(".csv"))
        assert rows, path
        assert all(row.get("source") or row.get("table") for row in rows), path
    assert all(family["source"] and family["rows"] for family in PLAN_FAMILIES.values())


def test_every_case_has_a_stack_that_is_fitted_and_a_positive_time():
    cases = report.all_cases()
    assert {case.stack for case in cases if case.structure} == set(report.FITTED)
    assert all(case.measured_s > 0 or case.memory_gib > 0 for case in cases)


def test_published_tables_without_constants_are_derived_again():
    def errors_of(name):
        return [row.predicted / row.published - 1 for row in TABLES()[name]]

    assert max(abs(row.predicted - row.published) for row in TABLES()["ZeRO Table 1, GB"]) <= 0.051
    assert max(map(abs, errors_of("Korthikanti Figure 1, GiB"))) < 0.005
    assert max(map(abs, errors_of("Korthikanti Table 4, ms of a layer"))) < 0.035  # nothing was fitted to them
    assert max(map(abs, errors_of("SC21 Table 2, days of 300B tokens"))) < 0.01
    assert max(map(abs, errors_of("SC21 section 5.10, TB of a checkpoint"))) < 0.03
    for row in TABLES()["zero-bubble Table 5"]:
        searched = "-1p" in row.label or "-2p" in row.label
        assert row.predicted <= row.published + 0.0001
        assert searched or abs(row.predicted - row.published) <= 0.00005 + 1e-9


def test_launches_take_what_profiled_layers_need():
    """Layers that launches bound, on one and two ranks: products and memory have no part in them."""
    rows = {row.label: row.predicted / row.published - 1 for row in TABLES()["vTrain, ms of a profiled layer"]}
    bound = [rows[f"{samples} samples, {ranks} ranks"] for samples in (1, 2) for ranks in (1, 2, 4)]
    assert max(map(abs, bound)) < 0.06
    assert abs(np.mean(bound)) < 0.03


ERRORS = resources.files("simulator.validation").joinpath("errors.csv").read_text().splitlines()


@pytest.fixture(scope="module")
def families():
    """All families but the one whose source computed its steps, which has a stack of its own."""
    with pytest.MonkeyPatch.context() as patch:
        cases = [case for case in report.all_cases() if case.stack != "vtrain-profile"]
        patch.setattr(report, "all_cases", lambda: cases)
        patch.setattr(report, "FITTED", {name: own for name, own in report.FITTED.items() if name != "vtrain-profile"})
        found = report.validate()
        return {family.name: family for family in found}, report.text_of_errors(found)


def test_what_answers_say_of_their_error_is_what_validate_finds(families):
    assert families[1].splitlines() == ERRORS


def test_errors_of_steps_that_are_alike_are_counted_together():
    one, every = Like("dense", "h100-sxm", "nemo"), Like("dense", "", "")
    rows = [(one, sign * 0.01 * table, str(table)) for table in range(1, 10) for sign in (1, -1, -1)]
    rows += [(one._replace(device="b200-sxm"), 0.3, "1")] * 2
    found = {each.like: each for each in errors_from("time", rows)}
    assert found[one][2:] == (27, pytest.approx(0.05), pytest.approx(0.09), pytest.approx(1 / 3))
    assert found[every][2:5] == (29, pytest.approx((0.44 + 0.126) / 9), 0.3), "each table counts once"
    assert {*found} == {one, one._replace(device=""), every}, "two rows are too few"
    assert str(found[one]).startswith("5.0% on average, 9 in 10 within 9%, too short more often than too")
    assert str(found[every]).startswith("6.3% on average, 9 in 10 tables within 30%")


def test_a_step_is_told_the_error_of_its_like_and_plans_within_it_are_equal():
    step = next(plan_cases("NeMo, Llama 8B")).step()
    error = error_of("time", step.workload, step.cluster)
    assert error.like == like_of(step.workload, step.cluster) == Like("dense", "h100-sxm", "nemo")
    assert f"plans 1 to 2 are within {error.mean:.1%}: equal as far as known" in words_on_plans([step, step])
    slow = next(plan_cases("NeMo, Grok-1")).step()
    assert "equal" not in words_on_plans([step, slow])
    bare = replace(slow.cluster, device=replace(slow.cluster.device, peak_flops_per_s=1e15))
    assert like_of(slow.workload, bare).wider()[2] == error_of("time", slow.workload, bare).like == ("mixture", "", "")


NEAR = tomllib.loads(Path(__file__).with_name("near.toml").read_text("utf-8"))


@pytest.mark.parametrize("family", NEAR)
def test_calibrated_predictions_stay_as_near_as_they_were(family, families):
    if family in families[0]:
        found = families[0][family].score("calibrated")
    else:  # of the 720 computed rows every eighth
        own = [case for case in report.all_cases() if case.family == family][::8]
        found = score([case.predict_s() for case in own], [case.measured_s for case in own], [""] * len(own))
    error, bias = NEAR[family]
    assert found.error < error
    assert abs(found.bias) < bias
