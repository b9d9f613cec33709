import json
import math
from dataclasses import replace

import numpy as np
import pytest
from counting import Counts, put_weights
from small import random_ids, random_model, random_weights, tiny_config

from minineo import InputError, KVCache, Recompute, compare, forward
from minineo.checkpoints.known import public_config
from minineo.study import costs, latency, prediction, report
from minineo.study.figures import (
    plot_break_even,
    plot_latency,
    plot_prediction,
    plot_roofline,
)
from minineo.study.gpus import processor
from minineo.study.latency import Ratio, fit_curve, fit_latency, measure_ratios
from minineo.study.prediction import (
    Prediction,
    Rates,
    RowRates,
    gpu_rates,
    launches,
    measure_rates,
    naive_pays_up_to,
    predict,
)
from minineo.study.report import check_folder, write_report

PROMPT, STEPS = 6, 26
LONG = tiny_config(max_position_embeddings=400, window_size=70)
ROWS = (RowRates(1, 1e6, 1e6, 1e-6, 2e-6, 3e-6), RowRates(100, 1e8, 1e8, 1e-7, 2e-7, 3e-7))
RATES = Rates(1e9, 1e8, 1e-5, ROWS)


@pytest.fixture(scope="module")
def comparison():
    return compare(random_model("float32"), list(range(PROMPT)), max_new_tokens=STEPS)


def timed(comparison, cached, naive):
    """Put other times into a comparison."""
    pairs = []
    for pair, *seconds in zip(comparison.pairs, cached, naive, strict=True):
        pairs.append(
            replace(
                pair,
                cached=replace(pair.cached, seconds=seconds[0]),
                naive=replace(pair.naive, seconds=seconds[1]),
            )
        )
    return replace(comparison, pairs=pairs)


def straight(comparison, **changes):
    """A comparison whose decode steps take 2 ms + 10 µs for each token, its naive steps 1 ms."""
    lengths = np.arange(PROMPT, PROMPT + STEPS)
    cached = 2e-3 + 1e-5 * lengths
    cached[0] = 5e-3
    for step, seconds in changes.get("cached", {}).items():
        cached[step] += seconds
    return timed(comparison, cached.tolist(), (1e-3 * lengths).tolist())


# the fit


@pytest.mark.parametrize("coefficients", [(0.036, 2e-6), (1e-3, 0.0), (2e-3, -1e-6), (5e-6, 1e-9)])
def test_a_line_is_found_again_among_outliers(coefficients):
    rng = np.random.default_rng(0)
    lengths = np.arange(300, 600)
    seconds = coefficients[0] + coefficients[1] * lengths
    noisy = seconds * rng.normal(1, 0.01, 300)
    noisy[rng.choice(300, 60, replace=False)] *= 20
    noisy[-10:] *= 5
    curve = fit_curve(lengths, noisy, 1)
    for length in (300, 450, 599):
        want = coefficients[0] + coefficients[1] * length
        assert curve.at(length) == pytest.approx(want, rel=0.01)
    assert curve.spread < 0.02 * seconds.max()


def test_a_bend_is_found_again_among_outliers():
    lengths = np.arange(1, 200)
    seconds = 1e-3 + 1e-4 * lengths + 3e-6 * lengths**2
    seconds[::7] += 0.5
    curve = fit_curve(lengths, seconds, 2)
    assert curve.coefficients == pytest.approx((1e-3, 1e-4, 3e-6), rel=1e-3)
    assert curve.spread < 1e-6


def test_steps_without_noise_are_fitted_exactly():
    curve = fit_curve([3, 4, 5], [0.5, 0.5, 0.5], 1)
    assert curve.at(4) == pytest.approx(0.5)
    assert fit_curve([1, 2, 3], [0.0, 0.0, 0.0], 1).at(2) == 0
    assert fit_curve([1, 2], [1.0, 3.0], 1).coefficients == pytest.approx((-1, 2))


def test_prefill_decode_and_growth_are_those_of_the_steps(comparison):
    fitted = fit_latency(straight(comparison), RATES)
    assert fitted.prefill_seconds == 5e-3
    assert fitted.curves["cached"].coefficients == pytest.approx((2e-3, 1e-5))
    assert fitted.curves["naive"].at(10) == pytest.approx(1e-2)
    first, last = 2e-3 + 1e-5 * (PROMPT + 1), 2e-3 + 1e-5 * (PROMPT + STEPS - 1)
    assert fitted.growth == pytest.approx(last / first - 1)
    assert max(map(abs, fitted.residuals("cached"))) < 1e-12
    assert fitted.lengths[-1] == PROMPT + STEPS - 1
    assert fitted.pays_from == 1  # step 0 is the same work on both


def test_the_prefill_is_no_part_of_the_line(comparison):
    few = replace(straight(comparison), pairs=straight(comparison).pairs[:4])
    assert fit_latency(few, RATES).curves["cached"].coefficients == pytest.approx((2e-3, 1e-5))


def test_a_slow_first_step_is_the_warm_up_and_not_the_fit(comparison):
    fitted = fit_latency(straight(comparison, cached={1: 7e-3, 9: 1.0}), RATES)
    assert fitted.curves["cached"].coefficients == pytest.approx((2e-3, 1e-5), rel=1e-3)
    assert fitted.warm_up("cached") == pytest.approx(7e-3, rel=1e-3)
    assert fitted.residuals("cached")[9] == pytest.approx(1.0, rel=1e-3)


def test_the_simple_formula_is_off_by_one_step_and_at_both_ends(comparison):
    fitted = fit_latency(straight(comparison), RATES)
    mean = fitted.mean_decode_seconds
    assert fitted.simple_seconds - fitted.total_seconds == pytest.approx(mean)
    assert fitted.fitted_seconds == pytest.approx(fitted.total_seconds)
    first, last = fitted.simple_off
    assert first == pytest.approx(mean / (2e-3 + 1e-5 * (PROMPT + 1)) - 1)
    assert last == pytest.approx(mean / (2e-3 + 1e-5 * (PROMPT + STEPS - 1)) - 1)
    assert last < 0 < first


def test_too_few_steps_are_refused(comparison):
    few = replace(comparison, pairs=comparison.pairs[:3])
    with pytest.raises(InputError, match="3 steps are too few to fit; ask for 4 or more"):
        fit_latency(few, RATES)
    four = fit_latency(replace(comparison, pairs=comparison.pairs[:4]), RATES)
    json.dumps(four.to_json(), allow_nan=False)


# the prediction


@pytest.mark.parametrize("new", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("cached", [True, False])
def test_launches_are_those_of_the_real_code(new, cached):
    counts = Counts()
    weights = put_weights(random_weights(LONG, "float32"), counts)
    cache = KVCache(LONG, 1, 400, weights.token_embedding) if cached else Recompute()
    tokens = random_ids(LONG, 1, new)
    counts.clear()
    forward(tokens, weights, LONG, cache)
    called = [launch for launch in counts.launches if launch.name != "copy"]
    assert launches(LONG, new, cached=cached) == len(called)


def test_a_decode_step_is_its_launches_and_its_bytes():
    fast = Rates(1e9, 1e8, 1e-5, (RowRates(1, math.inf, math.inf),))
    step = predict(LONG, 151, "cached", fast)
    looked_up = 2 * 4 * LONG.width
    assert step.weights == pytest.approx((costs.weight_bytes(LONG) + looked_up) / 1e9)
    moved = costs.cache_bytes_read(LONG, 150) + costs.cache_bytes(LONG, 1)
    assert step.cache == pytest.approx(moved / 1e8)
    assert step.launches == pytest.approx(launches(LONG, 1) * 1e-5)
    assert (step.products, step.numbers, step.repeated) == (0, 0, 0)
    assert step.seconds == pytest.approx(sum(step.parts.values()))


def test_a_naive_step_is_its_operations_and_what_goes_number_by_number():
    slow = Rates(math.inf, math.inf, 0.0, (RowRates(1, 1e9, 2e9, 1e-6, 2e-6, 3e-6, 4e-6),))
    step = predict(LONG, 150, "naive", slow)
    operations = costs.pass_costs(LONG, [150])
    attended = sum(o.flops for o in operations if o.name in ("scores", "mix"))
    others = sum(o.flops for o in operations) - attended
    assert step.products == pytest.approx(others / 1e9 + attended / 2e9)
    scores = sum(o.flops for o in operations if o.name == "scores") / (2 * LONG.head_dim)
    norms, inner = 2 * LONG.n_layers * 150 * LONG.width, LONG.n_layers * 150 * LONG.inner
    added = inner + 2 * norms  # a bias up, one down and one of attention, and two residuals
    assert step.numbers == pytest.approx(1e-6 * scores + 2e-6 * inner + 3e-6 * norms + 4e-6 * added)
    assert (step.launches, step.weights, step.cache) == (0, 0, 0)
    assert step.repeated == 149 / 150
    assert step.repeated_seconds == pytest.approx(step.seconds * 149 / 150)


def test_bytes_and_operations_of_one_product_overlap():
    rates = Rates(1e9, 1e9, 0.0, (RowRates(1, 1e9, 1e9),))
    step = predict(LONG, 150, "naive", rates)
    want = sum(max(o.bytes, o.flops) for o in costs.pass_costs(LONG, [150])) / 1e9
    assert step.seconds == pytest.approx(want)


def test_a_prefill_is_a_naive_step_that_also_writes_the_cache():
    prefill, naive = (predict(LONG, 50, path, RATES) for path in ("prefill", "naive"))
    written = costs.cache_bytes(LONG, 50) / RATES.cache_bytes_per_second
    assert prefill.cache - naive.cache == pytest.approx(written)
    assert prefill.repeated == 0


def test_a_gpu_launches_while_it_works():
    work = predict(LONG, 10, "cached", Rates(1e3, 1e3, 1e-5, ROWS, waits=False))
    assert work.launches == 0
    idle = predict(LONG, 10, "cached", Rates(1e30, 1e30, 1e-5, ((RowRates(1, 1e30, 1e30)),), False))
    assert idle.seconds == pytest.approx(launches(LONG, 1) * 1e-5)


def test_rates_lie_between_those_that_were_measured():
    assert RATES.at(1) == ROWS[0]
    assert RATES.at(10).flops_per_second == pytest.approx((1e6 + 1e8) / 2)
    assert RATES.at(1000) == RowRates(1000, *ROWS[1][1:])
    assert RATES.peak_flops_per_second == 1e8


def test_from_which_length_the_cache_pays():
    # bytes alone: a naive step reads the same weights, and no more keys
    bound = Rates(1e9, 1e9, 0.0, (RowRates(1, 1e30, 1e30),))
    length = naive_pays_up_to(LONG, bound)
    steps = {n: {p: predict(LONG, n, p, bound).seconds for p in ("cached", "naive")}
             for n in (length, length + 1) if 0 < n <= LONG.context}  # fmt: skip
    assert all((s["naive"] > s["cached"]) == (n > length) for n, s in steps.items())
    # arithmetic alone: the second token already costs more
    assert naive_pays_up_to(LONG, Rates(1e30, 1e30, 0.0, (RowRates(1, 1e6, 1e6),))) == 1
    # launches alone: they are the same in a block of queries
    idle = Rates(1e30, 1e30, 1e-5, (RowRates(1, 1e30, 1e30),))
    assert naive_pays_up_to(LONG, idle) in (1, 64)


def test_on_a_gpu_a_short_naive_step_takes_as_long_as_a_cached_one():
    for name in ("gpt-neo-125m", "gpt-neo-2.7b"):
        config = public_config(name)
        rates = gpu_rates(processor("H200", config, 1, "float16"))
        naive, cached = (predict(config, 32, p, rates, itemsize=2) for p in ("naive", "cached"))
        assert naive.seconds == pytest.approx(cached.seconds, rel=0.05)
        assert naive_pays_up_to(config, rates, itemsize=2) >= 32


def test_measured_rates_are_of_this_machine():
    model = random_model("float32", hidden_size=64, max_position_embeddings=300)
    rates = measure_rates(model, [5, 100, 5])
    assert [each.rows for each in rates.by_rows] == [5, 100]
    for speed in (rates.weight_bytes_per_second, rates.cache_bytes_per_second,
                  *(each.flops_per_second for each in rates.by_rows),
                  *(each.attention_flops_per_second for each in rates.by_rows)):  # fmt: skip
        assert 1e6 < speed < 1e15
    assert 1e-8 < rates.launch_seconds < 1e-2
    assert all(0 <= seconds < 1e-3 for each in rates.by_rows for seconds in each[3:])
    assert rates.waits
    json.dumps(rates.to_json(), allow_nan=False)


def test_clocks_wait_for_the_device(monkeypatch):
    counts = Counts()
    from minineo import Model
    from minineo.device import Device

    weights = put_weights(random_weights(LONG, "float32"), counts)
    model = Model("small", LONG, weights, None, Device("cuda", cupy=counts.cupy))
    monkeypatch.setattr(prediction, "BUDGET_SECONDS", 0)
    rates = measure_rates(model, [3])
    assert counts.synchronisations >= 2 * (1 + prediction.REPEATS) * 8
    assert not rates.waits


# the experiment on a public shape


def test_ratios_are_of_medians_of_passes_really_made(monkeypatch, capsys):
    found = measure_ratios("tinystories-1m", [2, 9], rates=lambda model, lengths: RATES)
    assert [ratio.length for ratio in found] == [2, 9]
    for ratio in found:
        assert ratio.measured_ratio == ratio.measured["naive"] / ratio.measured["cached"]
        want = [predict(public_config("tinystories-1m"), ratio.length, p, RATES).seconds
                for p in ("naive", "cached")]  # fmt: skip
        assert ratio.predicted_ratio == want[0] / want[1]
        assert ratio.off == pytest.approx(ratio.predicted_ratio / ratio.measured_ratio - 1)
    monkeypatch.setattr(latency, "measure_ratios", lambda shape, lengths: found)
    monkeypatch.setattr("sys.argv", ["latency", "--shape", "tinystories-1m", "2", "9"])
    latency.main()
    out = capsys.readouterr().out
    assert out.count("naive / cached: measured") == 2
    assert max(map(len, out.splitlines())) <= 100


def test_the_experiment_refuses_what_it_cannot_measure(monkeypatch):
    with pytest.raises(InputError, match="length is 1; it must be a whole number from 2"):
        measure_ratios("tinystories-1m", [1])
    monkeypatch.setattr("sys.argv", ["latency", "--shape", "5b"])
    with pytest.raises(SystemExit, match="minineo: unknown shape '5b'"):
        latency.main()


def test_a_ratio_says_how_far_it_is_off():
    two = Prediction(2.0, 0, 0, 0, 0)
    ratio = Ratio(
        9, {"naive": two, "cached": replace(two, launches=1.0)}, {"naive": 5, "cached": 2}
    )
    assert ratio.off == pytest.approx(-0.2)


@pytest.mark.slow
def test_the_125m_shape_is_measured_and_predicted_at_three_lengths(capsys):
    found = measure_ratios()
    latency.print_ratios(found)
    assert [ratio.length for ratio in found] == [64, 256, 1024]
    assert all(ratio.off > -1 for ratio in found)  # how far off is for a quiet machine to say
    assert capsys.readouterr().out.count("off by") == 3


# pictures


def test_the_pictures_show_what_was_measured_fitted_and_predicted(comparison):
    fitted = fit_latency(straight(comparison), RATES)
    cached, naive, *_ = plot_latency(fitted).axes
    for axes, path, steps in ((cached, "cached", STEPS - 1), (naive, "naive", STEPS)):
        measured, fit, predicted = axes.lines
        assert len(measured.get_xdata()) == len(fit.get_xdata()) == steps
        np.testing.assert_allclose(fit.get_ydata(), measured.get_ydata())
        length = int(predicted.get_xdata()[-1])
        want = 1000 * predict(fitted.config, length, path, RATES).seconds
        assert predicted.get_ydata()[-1] == pytest.approx(want)
        assert "fit: " in fit.get_label()

    so_far, ratio = plot_break_even(fitted, {"T4": RATES}).axes
    assert so_far.lines[0].get_ydata()[-1] == pytest.approx(1000 * sum(fitted.seconds["naive"]))
    measured, predicted, other, _ = ratio.lines
    assert measured.get_ydata()[0] == pytest.approx(7e-3 / (2e-3 + 7e-5))
    np.testing.assert_allclose(other.get_ydata(), predicted.get_ydata())

    (bars,) = plot_prediction(fitted).axes
    ends = [bars.patches[len(bars.patches) // 5 * 4 + place] for place in range(6)]
    first = fitted.places[0]
    share = fitted.predicted("cached", first).seconds / fitted.curves["cached"].at(first)
    assert ends[0].get_x() + ends[0].get_width() == pytest.approx(100 * share)

    (roofline,) = plot_roofline(fitted).axes
    roof, points = (
        roofline.lines[0],
        [line for line in roofline.lines if len(line.get_xdata()) == 1],
    )
    assert len(points) == 3
    assert max(roof.get_ydata()) == pytest.approx(RATES.peak_flops_per_second / 1e9)
    middle = fitted.places[1]
    done = costs.total(costs.pass_costs(fitted.config, [1], [middle - 1]))
    assert points[1].get_xdata()[0] == pytest.approx(done.intensity)
    speed = done.flops / fitted.curves["cached"].at(middle) / 1e9
    assert points[1].get_ydata()[0] == pytest.approx(speed)


# the report


FILES = ["break-even.png", "cache.png", "latency.png", "prediction.png", "report.json",
         "report.md", "roofline.png", "steps.png"]  # fmt: skip


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are put together, and not drawn: that takes its time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file: file.touch())


def test_a_report_is_all_pictures_all_numbers_and_a_page(comparison, tmp_path):
    folder = tmp_path / "my reports" / "first"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    page = write_report(straight(comparison), folder, RATES)
    assert sorted(file.name for file in folder.iterdir()) == sorted([*FILES, "notes.txt"])
    text = page.read_text()
    for name in FILES:
        assert f"({name})" in text or name == "report.md"
        assert (folder / name).stat().st_size > 0
    numbers = json.loads((folder / "report.json").read_text())
    assert numbers["summary"]["agree"]
    assert numbers["latency"]["prefill_seconds"] == 5e-3
    assert numbers["plan"]["measured"]["prefill_seconds"] == 5e-3
    assert numbers["plan"]["gpu"]["bytes_per_second"] == 1e9
    assert "5 ms for the prefill, and 2 ms + t x +10 µs" in text
    assert "off by" in text


def test_a_report_of_few_steps_leaves_the_latency_out(comparison, tmp_path, undrawn):
    for count in (1, 3):
        few = replace(comparison, pairs=comparison.pairs[:count])
        page = write_report(few, tmp_path / str(count), RATES)
        assert "ask for 4 steps or more" in page.read_text()
        names = sorted(file.name for file in page.parent.iterdir())
        assert names == ["cache.png", "report.json", "report.md", "steps.png"]


def test_a_report_claims_no_growth_that_is_not_seen(comparison, tmp_path, undrawn):
    short = straight(comparison)
    short = replace(short, pairs=short.pairs[:15])
    falling = timed(comparison, np.linspace(3e-3, 2e-3, STEPS).tolist(), [1e-3] * STEPS)
    for shown, says in ((short, "too few steps for a fit; ask for 16"), (falling, "no growth to")):
        text = write_report(shown, tmp_path, RATES).read_text()
        assert f"for a decode step on average: {says}" in text
        assert "t x" not in text
        assert "its mean is off" not in text


def test_a_report_of_a_path_that_broke_down_says_so(monkeypatch, tmp_path, undrawn):
    def fault(cache, layer, new_keys, new_values):
        raise ValueError("shapes do not fit")

    monkeypatch.setattr(KVCache, "extend", fault)
    broken = compare(random_model("float32"), [1, 2], max_new_tokens=5)
    page = write_report(broken, tmp_path, RATES)
    assert "The paths differ, first at" in page.read_text()
    assert "broke down" in page.read_text()


def test_a_report_of_a_full_context_is_written(tmp_path, undrawn):
    full = compare(random_model("float32"), list(range(32)), max_new_tokens=4)
    assert len(full.pairs) == 1
    page = write_report(full, tmp_path, RATES)
    numbers = json.loads((page.parent / "report.json").read_text())["plan"]
    assert (numbers["prompt_tokens"], numbers["new_tokens"]) == (32, 1)
    most = compare(random_model("float64"), [1], max_new_tokens=99)
    assert write_report(most, tmp_path, RATES).exists()


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    comparison, tmp_path, monkeypatch
):
    file = tmp_path / "file"
    file.write_text("mine")
    for folder in (file, file / "below"):
        with pytest.raises(InputError, match="is no folder; name a folder for the report"):
            write_report(comparison, folder, RATES)
    monkeypatch.setattr(report.os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="cannot write into"):
        check_folder(tmp_path / "new")


def test_a_report_says_when_others_keep_the_machine_busy(
    comparison, tmp_path, monkeypatch, undrawn
):
    one = replace(comparison, pairs=comparison.pairs[:1])
    for busy, warned in ((1.5, True), (0.0, False), (None, False)):
        monkeypatch.setattr(report, "busy_cores", lambda busy=busy: busy)
        text = write_report(one, tmp_path, RATES).read_text()
        assert ("Others keep 1.5 cores busy" in text) == warned


def test_a_failed_picture_leaves_the_old_report(comparison, tmp_path, monkeypatch, undrawn):
    (tmp_path / "report.md").write_text("old")
    monkeypatch.setattr(report.json, "dumps", None)
    with pytest.raises(TypeError):
        write_report(straight(comparison), tmp_path, RATES)
    assert (tmp_path / "report.md").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.md"]
