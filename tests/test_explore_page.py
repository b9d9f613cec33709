"""The page in a browser: opened from disk, offline, walked by button and key, read, and looked at."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from small import random_model
from test_explore import NASTY, STORY

from minineo import KVCache, Recompute, Trace, explore, load
from minineo.cli.compare import PROMPT
from minineo.study.costs import run_costs

pytestmark = pytest.mark.slow
STEPS = 24  # the prompt and these go past the local window
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu")


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory):
    """The pages that the tests look at, each made once."""
    folder = tmp_path_factory.mktemp("pages")
    made = {}

    def file(name):
        if name not in made:
            options = {
                "right": {"prompt": PROMPT, "max_new_tokens": STEPS},
                "window": {"prompt": PROMPT, "max_new_tokens": 22, "fault": "window-too-wide"},
                "ruined": {"prompt": PROMPT, "max_new_tokens": 6, "fault": "padding-counted"},
                "before": {"prompt": STORY, "max_new_tokens": 5, "fault": "first-position"},
            }[name]
            prompt = options.pop("prompt")
            made[name] = folder / f"{name}.html"
            explore(tiny, prompt, **options).save(made[name])
        return made[name]

    return file


@pytest.fixture
def visit(browser):
    """Open a file with no network; whatever the console or the page complains of fails the test."""
    contexts, complaints = [], []

    def open_page(file, width=1280, height=900, **options):
        context = browser.new_context(
            viewport={"width": width, "height": height}, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "data:")) or complaints.append(request.url)
            ),
        )
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def traces(tiny):
    """Both paths of the right page, traced: a list of steps, each (cached, naive)."""
    ids = [t["id"] for t in explore(tiny, PROMPT, max_new_tokens=STEPS).facts["tokens"]]
    prompt = len(tiny.encode(PROMPT))
    cache = KVCache(tiny.config, 1, len(ids), like=tiny.weights.token_embedding)
    found = []
    for end in range(prompt, prompt + STEPS):
        pair = Trace(), Trace()
        tiny.forward([ids[cache.length : end]], cache, trace=pair[0])
        tiny.forward([ids[:end]], Recompute(), trace=pair[1])
        found.append(pair)
    return found


def show(page, **state):
    page.evaluate("state => show(state)", state)


def where(page):
    return page.locator("#where").evaluate("output => output.value")


def short(page, number):
    """Return a number as the page writes it."""
    return page.evaluate("number => short(number)", float(number))


def check_shown(page, traces, index, layer, head):
    """The table of the newest row, the shapes and the readout are those of the trace."""
    cached, naive = (
        {name: trace[f"block{layer}.{name}"][0, head] for name in ("scores", "pattern", "keys")}
        for trace in traces[index]
    )
    tokens = naive["keys"].shape[0]
    rows = page.locator("#row-table tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert len(rows) == tokens
    numbers = [
        [
            float(trace[name][-1, slot])
            for trace in (cached, naive)
            for name in ("scores", "pattern")
        ]
        for slot in range(tokens)
    ]
    words = page.evaluate("rows => rows.map(row => row.map(short))", numbers)
    for slot, (row, numbers_shown, row_numbers) in enumerate(
        zip(rows, words, numbers, strict=True)
    ):
        assert row[1] == str(slot)
        for first, place in ((3, 0), (6, 2)):
            if row_numbers[place] < -1e30:
                assert row[first : first + 2] == ["hidden", "before the window"]
            else:
                assert row[first : first + 2] == numbers_shown[place : place + 2]
        old = slot < tokens - 1 if index else False
        assert row[2] == ("from the cache" if old else "made for the first time")
        assert row[5] == ("made again" if old else "made for the first time")
    made = cached["scores"].shape[0]
    assert page.evaluate("drawn.cached.map(box => [box.rows, box.columns])") == [
        [made, 32], [32, tokens], [made, tokens], [tokens, 32], [made, 32]
    ]  # fmt: skip
    assert page.evaluate("drawn.naive.map(box => [box.rows, box.columns])") == [
        [tokens, 32], [32, tokens], [tokens, tokens], [tokens, 32], [tokens, 32]
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["button", "key"])
def test_all_steps_are_walked_in_both_directions_and_show_what_the_traces_hold(
    visit, files, traces, how
):
    page = visit(files("right"))
    layer, head = (1, 2) if how == "button" else (4, 0)
    show(page, step=0, layer=layer, head=head)
    places = [*range(STEPS), *range(STEPS - 2, -1, -1)]
    for before, index in zip([None, *places], places, strict=False):
        if before is not None:
            forward = index > before
            if how == "button":
                page.click("#next" if forward else "#back")
            else:
                page.keyboard.press("ArrowRight" if forward else "ArrowLeft")
        phase = "decode" if index else "prefill"
        assert where(page) == f"Step {index} of {STEPS - 1}: {phase}"
        check_shown(page, traces, index, layer, head)
    assert page.locator("#back").is_disabled()
    page.keyboard.press("End")
    assert where(page).startswith(f"Step {STEPS - 1} ")
    page.keyboard.press("Home")
    assert where(page).startswith("Step 0 ")


def test_every_cell_that_is_pointed_at_tells_its_value_and_its_tokens(visit, files, traces, tiny):
    page = visit(files("right"))
    index, layer, head = 20, 3, 1
    show(page, step=index, layer=layer, head=head)
    rng = np.random.default_rng(0)
    prompt = len(tiny.encode(PROMPT))

    def matrix(step, path, name):
        return traces[step][path][f"block{layer}.{name}"][0, head]

    assert tiny.config.windows[layer] < prompt + index, "a window cuts here"
    for path in (0, 1):
        for place, name in enumerate(("queries", "keys", "scores", "values", "mixed")):
            rows, columns = matrix(index, path, name).shape
            for _ in range(5):
                row, column = int(rng.integers(rows)), int(rng.integers(columns))
                cell = [column, row] if name == "keys" else [row, column]
                page.evaluate(
                    "([path, place, cell]) => point(path, place, ...cell)",
                    [("cached", "naive")[path], place, cell],
                )
                said = page.text_content("#readout")
                # the naive path's rows are shown as they were when it made them first
                made = index if path == 0 else max(0, row - prompt + 1)
                found = matrix(made, path, name)
                number = float(found[row, column]) if column < found.shape[1] else -np.inf
                if name == "scores" and number < -1e30:
                    later = column > (prompt + index - 1 if path == 0 else row)
                    why = "later than the query" if later else "before the window"
                    assert f"hidden: {why}" in said
                else:
                    assert f" {short(page, number)};" in said
                if name == "scores":
                    query = prompt + index - 1 if path == 0 else row
                    assert re.search(rf"query ‘.*’ at {query} × key ‘.*’ at {column};", said)
                elif name in ("keys", "values"):
                    assert re.search(rf"‘.*’ at {row}, number {column} of 32", said)


def test_a_mouse_and_the_arrow_keys_walk_from_cell_to_cell(visit, files, traces):
    page = visit(files("right"))
    show(page, step=5, layer=0, head=3)
    score = traces[5][0]["block0.scores"][0, 3]
    page.locator("#row").scroll_into_view_if_needed()
    box, place = page.evaluate("drawn.row[0]"), page.locator("#row").bounding_box()
    page.mouse.move(
        place["x"] + box["x"] + 7.5 * box["cell"], place["y"] + box["y"] + box["height"] / 2
    )
    assert page.locator("#tip b").text_content() == f"score {short(page, score[0, 7])}"
    assert "at 7" in page.text_content("#tip")
    assert page.locator("#tip").is_visible()
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()
    page.focus("#cached")
    page.keyboard.press("ArrowLeft")
    last = score.shape[1] - 1
    assert f"score {short(page, score[0, last - 1])}" in page.text_content("#readout")
    page.keyboard.press("Home")
    assert f"score {short(page, score[0, 0])}" in page.text_content("#readout")
    page.keyboard.press("PageDown")
    assert page.text_content("#readout").startswith("cached, V: value ")
    assert where(page).startswith("Step 5 "), "in a picture the arrows do not change the step"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_the_totals_are_those_of_the_shapes(visit, files, tiny):
    page = visit(files("right"))
    show(page, step=STEPS - 1)
    prompt = len(tiny.encode(PROMPT))
    naive = run_costs(tiny.config, prompt, STEPS, "naive")[-1]
    cached = run_costs(tiny.config, prompt, STEPS, "cached")[-1]
    rows = page.locator("#bill-all tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
    )
    table = {row[0]: row[1:3] for row in rows}
    keys = naive.remade_so_far * 6 * 4
    assert table["tokens fed"] == [f"{cached.fed_so_far:,}", f"{naive.fed_so_far:,}"]
    assert table["keys computed again"] == ["0", f"{keys:,}"]
    flops = page.evaluate(
        "numbers => numbers.map(flops)", [c.cost_so_far.flops for c in (cached, naive)]
    )
    assert table["arithmetic"] == flops
    said = page.text_content("#grid-naive-says")
    assert f"{naive.fed_so_far:,} computed" in said
    assert f"= {keys:,} keys" in said
    assert f"{cached.fed_so_far:,} computed" in page.text_content("#grid-cached-says")
    assert "414 KiB" in page.text_content("#price"), "69 tokens of 6 KiB"


def test_pieces_of_the_time_line_are_as_long_as_their_steps_took(visit, files):
    page = visit(files("right"))
    for path in ("cached", "naive"):
        pieces = page.locator(f"#lane-{path} .piece")
        widths = np.array(
            pieces.evaluate_all("all => all.map(each => each.getBoundingClientRect().width)")
        )
        seconds = np.array(page.evaluate("path => steps.map(step => step.seconds[path])", path))
        if path == "cached":
            scale = widths.sum() / seconds.sum()
        np.testing.assert_allclose(widths, seconds * scale, rtol=0.02, atol=1.1)  # of a pixel
    pieces.nth(4).click()
    assert where(page).startswith("Step 4 ")
    assert page.locator("#lane-cached .done").count() == 5


def test_it_plays_pauses_and_starts_again(visit, files):
    page = visit(files("right"))
    page.clock.install()
    show(page, step=STEPS - 3)
    page.click("#play")
    assert page.text_content("#play") == "Pause"
    page.clock.run_for(1500)
    assert where(page).startswith(f"Step {STEPS - 1} ")
    assert page.text_content("#play") == "Play", "at the end it stops"
    page.locator("h1").click()
    page.keyboard.press(" ")
    assert where(page).startswith("Step 0 "), "played at the end, it begins again"
    page.clock.run_for(800)
    assert where(page).startswith("Step 1 ")
    page.keyboard.press(" ")
    page.clock.run_for(5000)
    assert where(page).startswith("Step 1 ")


def test_the_text_grows_and_a_click_on_a_token_goes_to_its_step(visit, files, tiny):
    page = visit(files("right"))
    prompt = len(tiny.encode(PROMPT))
    for index in (0, 7, STEPS - 1):
        show(page, step=index)
        seen = page.locator("#text > :not(.later)")
        assert seen.count() == prompt + index + 1
    page.locator("#text > *").nth(prompt + 3).click()
    assert where(page).startswith("Step 3 ")
    assert page.locator("#text > .written").count() == 1
    page.locator("#text > *").nth(5).focus()
    page.keyboard.press("Enter")
    assert where(page).startswith("Step 0 ")
    text = "".join(page.locator("#text > *").all_text_contents())
    assert text.startswith(PROMPT)


def test_layers_heads_and_views_change_by_choice_and_by_key(visit, files):
    page = visit(files("right"))
    page.select_option("#layer", "3")
    page.select_option("#head", "2")
    page.locator("h1").click()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("[")
    assert page.evaluate("[state.layer, state.head]") == [4, 1]
    page.locator("#layer-table button").nth(5).click()
    assert page.evaluate("state.layer") == 5
    for key, view in (("2", "pattern"), ("3", "mix"), ("1", "scores")):
        page.keyboard.press(key)
        assert page.locator(f"[data-view={view}]").get_attribute("aria-checked") == "true"
    page.focus("[data-view=scores]")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[state.view, document.activeElement.dataset.view]") == ["pattern"] * 2
    assert page.evaluate("drawn.cached[2].name") == "pattern"


def red(page, canvas):
    """How many pixels of a canvas have the colour of what is wrong."""
    return page.evaluate(
        """canvas => {
            const wanted = colour("wrong").match(/\\w\\w/g).map((hex) => parseInt(hex, 16));
            const { width, height } = byId(canvas);
            const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(byId(canvas), 0, 0);
            const { data } = copy.getImageData(0, 0, width, height);
            let found = 0;
            for (let i = 0; i < data.length; i += 4) {
                found += wanted.every((each, channel) => Math.abs(each - data[i + channel]) < 3);
            }
            return found;
        }""",
        canvas,
    )


def test_the_first_wrong_cell_is_marked_red_and_with_a_sign(visit, files):
    page = visit(files("window"))
    assert "First wrong value: step 19, layer 1, scores." in page.text_content("#verdict")
    assert "✗" in page.text_content("#verdict")
    assert page.evaluate("[state.step, state.layer, state.head]") == [19, 1, 0], "it opens there"
    assert red(page, "cached") > 40
    assert red(page, "row") > 4
    assert page.locator("#ladder td.first").text_content().startswith("✗")
    assert page.locator("#ladder td.first").get_attribute("title") == "the first wrong value"
    assert page.locator("#lane-cached .flag").count() == 1
    page.evaluate("point('cached', 2, 0, 0)")
    assert "✗ the naive path hides it" in page.text_content("#readout")
    show(page, step=18)
    assert red(page, "cached") == red(page, "naive") == red(page, "row") == 0
    assert page.locator("#ladder .wrong").count() == 0
    page.click("text=Go to the first wrong value")
    assert where(page).startswith("Step 19 ")


def test_the_step_at_which_the_text_goes_wrong_is_marked(visit, files):
    page = visit(files("ruined"))
    step = page.evaluate("facts.fault.wrong_step")
    assert f"✗ The text goes wrong at step {step}." in page.text_content("#verdict")
    assert page.locator("#wrong-text .wrong").count() == 1
    page.click("text=Go to where the text goes wrong")
    assert where(page).startswith(f"Step {step} ")
    assert "✗ The paths prefer different tokens" in page.text_content("#difference")


def test_a_wrong_value_outside_the_head_is_marked_in_the_table(visit, files):
    page = visit(files("before"))
    page.click("text=Go to the first wrong value")
    first = page.locator("#ladder td.first")
    assert first.count() == 1
    column = first.evaluate("cell => cell.cellIndex")
    assert page.locator("#ladder thead th").nth(column).text_content() == "before"


@pytest.mark.parametrize("name", ["right", "window", "ruined"])
def test_nothing_is_cut_off_at_phone_width(visit, files, name):
    page = visit(files(name), width=375, height=740, has_touch=True, is_mobile=True)
    for view in ("scores", "mix"):
        show(page, view=view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        wide = page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter((each) =>
                !each.closest(".scroll, .unseen, .skip") && each.getBoundingClientRect().right > 376
            ).map((each) => each.tagName + "#" + each.id)"""
        )
        assert wide == []
    box = page.evaluate("drawn.row[0]")
    page.locator("#row").tap(position={"x": box["x"] + 9.5 * box["cell"], "y": box["y"] + 8})
    assert page.locator("#tip").is_visible()
    assert page.evaluate("byId('tip').getBoundingClientRect().right") <= 375


def test_a_projector_is_filled_and_panels_stand_side_by_side(visit, files):
    page = visit(files("right"), width=1920, height=1080)
    cached, naive = (page.locator(f"#{name}").bounding_box() for name in ("cached", "naive"))
    assert cached["y"] == naive["y"]
    assert cached["x"] + cached["width"] <= naive["x"]
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") > 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(visit, files, scheme):
    page = visit(files("right"), color_scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme

    def colours():
        names = ("card", "paper", "ink", "quiet", "cache", "again", "new", "wrong", "accent")
        return dict(zip(names, page.evaluate("names => names.map(colour)", names), strict=True))

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    found = colours()
    for name in ("ink", "quiet", "cache", "again", "new", "wrong", "accent"):
        for ground in ("card", "paper"):
            low, high = sorted(luminance(found[each]) for each in (name, ground))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
    assert colours() != found


def test_the_tour_leads_through_the_page_and_gives_the_focus_back(visit, files):
    page = visit(files("right"))
    page.click("#tour-open")
    stops = page.evaluate("STOPS.length")
    for number in range(1, stops + 1):
        assert page.text_content("#tour-count") == f"{number} of {stops}"
        assert page.evaluate("document.activeElement.id") == "tour-title"
        assert page.locator(".toured").count() == 1
        page.click("#tour-next")
    assert page.locator("#tour").is_hidden()
    assert page.evaluate("document.activeElement.id") == "tour-open"
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.locator("#tour").is_hidden()


def test_a_screen_reader_finds_names_and_news(visit, files):
    page = visit(files("right"))
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, canvas, [role]")].filter(
            (each) => !each.closest("[aria-hidden=true]") && !each.textContent.trim() &&
                !each.getAttribute("aria-label") && !each.getAttribute("aria-labelledby")
        ).map((each) => each.outerHTML)"""
    )
    assert nameless == []
    page.keyboard.press("ArrowRight")
    assert page.text_content("#announce").startswith("Step 2 of")
    assert page.get_attribute("#announce", "aria-live") == "polite"
    assert "Step 2" in page.get_attribute("#step", "aria-valuetext")
    seen = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
    assert {"tour-open", "step", "play", "next", "layer", "cached", "naive", "row"} <= seen


@pytest.mark.parametrize("prompt", NASTY)
def test_any_text_is_shown_as_it_is(visit, tiny, tmp_path, prompt):
    exploration = explore(replace(tiny, name=prompt), prompt, max_new_tokens=3)
    exploration.save(tmp_path / "nasty.html")
    page = visit(tmp_path / "nasty.html")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    pieces = [token["piece"] for token in exploration.facts["tokens"]]
    shown = page.locator("#text > *").all_text_contents()
    assert len(shown) == len(pieces)
    steer = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
    assert shown == [steer.sub("\ufffd", piece) or "‥" for piece in pieces]
    assert not steer.search(page.inner_text("body"))


def test_ids_without_text_and_a_single_step_are_shown(visit, tmp_path):
    model = random_model("float32")
    explore(model, [7], max_new_tokens=1).save(tmp_path / "one.html")
    page = visit(tmp_path / "one.html")
    assert where(page) == "Step 0 of 0: prefill"
    assert page.locator("#back").is_disabled()
    assert page.locator("#next").is_disabled()
    page.click("#play")
    page.keyboard.press("ArrowRight")


def test_a_notebook_shows_it_in_a_frame(visit, tiny, tmp_path):
    (tmp_path / "notebook.html").write_text(
        f"<!DOCTYPE html><meta charset=utf-8>{explore(tiny, STORY, max_new_tokens=3)._repr_html_()}",
        encoding="utf-8",
    )
    page = visit(tmp_path / "notebook.html")
    frame = page.frame_locator("iframe")
    frame.locator("#next").click()
    assert frame.locator("#where").evaluate("output => output.value") == "Step 2 of 2: decode"
