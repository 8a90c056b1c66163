"""The report as a reader meets it: Chromium, real pointer and clicks."""

import json
import shutil
from pathlib import Path

import pytest

from depthroute.diagnostics.report import write_report
from tests.runs import METHODS, write_ladder, write_run, write_sweep

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--no-first-run"]
CASES = {
    "two runs": [(("standard", "delta"), 6), (("standard", "delta-block"), 6)],
    "six methods": [(METHODS, 6)],
    "six runs": [((method,), 6) for method in METHODS],
    "96 layers": [(METHODS, 96)],
    "sweep": write_sweep,
    "ladder": write_ladder,
    "sizes given as settings": lambda path: write_ladder(
        path, METHODS, tuple(f"hidden_size={n}__num_hidden_layers={n}" for n in range(64, 384, 64))
    ),
}
MOST_BYTES = 5_000_000


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        found = CHROMIUM or driver.chromium.executable_path  # the system's, or playwright's own
        if not Path(found).exists():
            pytest.skip("no chromium on this machine; install it or `playwright install chromium`")
        opened = driver.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=CASES)
def page(request, browser, tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    case = CASES[request.param]
    if callable(case):
        runs = [case(root / "run")]
    else:
        runs = [
            write_run(root / f"run{n}", methods, layers=layers, memory=True)
            for n, (methods, layers) in enumerate(case)
        ]
    write_report(runs, root / "report.html")
    assert (root / "report.html").stat().st_size < MOST_BYTES
    opened = browser.new_page(viewport={"width": 1180, "height": 1000}, accept_downloads=True)
    opened.problems, opened.requests = [], []
    opened.on("console", lambda message: opened.problems.append(message.text))
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("request", lambda request: opened.requests.append(request.url))
    opened.goto(f"file://{root / 'report.html'}")
    opened.data = json.loads(opened.locator("#data").text_content())
    yield opened
    assert opened.problems == []
    assert [u for u in opened.requests if not u.startswith(("file:", "data:", "blob:"))] == []
    opened.close()


def until(page, is_so):
    """For whatever the page or the browser takes its time."""
    for _ in range(600):
        if is_so():
            return
        page.wait_for_timeout(50)
    pytest.fail("it did not come about")


def point_at(page, svg, x, y):
    """Move the pointer to a place given in the drawing's own coordinates."""
    page.locator(svg).scroll_into_view_if_needed()
    place = page.evaluate(
        "([s, x, y]) => { const p = new DOMPoint(x, y).matrixTransform("
        "document.querySelector(s).getScreenCTM()); return [p.x, p.y]; }",
        [svg, x, y],
    )
    page.evaluate("([y]) => scrollBy(0, y - innerHeight / 2)", [place[1]])
    place = page.evaluate(
        "([s, x, y]) => { const p = new DOMPoint(x, y).matrixTransform("
        "document.querySelector(s).getScreenCTM()); return [p.x, p.y]; }",
        [svg, x, y],
    )
    page.mouse.move(*place)
    return page.locator("#tip")


def test_every_panel_is_seen(page):
    for name in ("results", "curves", "maps", "sharpness", "magnitudes", "cost", "settings"):
        box = page.locator(f"#panel-{name}").bounding_box()
        assert box["width"] > 600 and box["height"] > 80
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0


@pytest.mark.parametrize("figure", ["curves", "sharpness", "magnitudes"])
def test_hovering_a_chart_shows_the_values_there(page, figure):
    facet = page.data["hover"][figure]["facets"][0]
    x, y, width, height = facet["box"]
    tip = point_at(page, f"#{figure}", x + width, y + height / 2)
    assert tip.is_visible()
    last = max(v for line in facet["lines"] for v in line["x"])
    for line in facet["lines"]:
        if last in line["x"]:
            assert page.data["series"][line["series"]]["label"] in tip.text_content()
    page.mouse.move(2, 2)
    assert not tip.is_visible()


def test_hovering_a_bar_shows_the_speed_in_full(page):
    group = page.data["hover"]["cost"]["bars"][0]
    x, y, width, height = group["boxes"][0]
    tip = point_at(page, "#cost", x + width / 2, y + height / 2)
    rate = page.data["series"][group["series"][0]]["cost"]["tokens_per_second"]
    assert f"{rate:,.0f}" in tip.text_content()
    page.mouse.move(2, 2)


def test_hovering_a_cell_shows_its_weight_for_every_method(page):
    tabs = page.locator(".tabs button")
    for number in range(tabs.count()):
        tabs.nth(number).click()
        name = tabs.nth(number).get_attribute("data-shows")
        shown = page.locator("#panel-maps figure svg:visible")
        assert shown.count() == 1 and shown.get_attribute("id") == name
        grid = page.data["hover"][name]["maps"][0]
        trace = page.data["series"][int(name[4:])]["trace"]
        row = len(grid["sites"]) - 1
        site = next(s for s in trace["sites"] if s["name"] == grid["sites"][row])
        position = len(site["sources"]) - 1
        column = grid["sources"].index(site["sources"][position])
        x, y, width, height = grid["box"]
        x += width * (column + 0.5) / len(grid["sources"])
        y += height * (row + 0.5) / len(grid["sites"])
        tip = point_at(page, f"#{name}", x, y)
        assert f"{site['name']} reads {trace['sources'][site['sources'][position]]}" in (
            tip.text_content()
        )
        shown = tip.locator("b").nth(1).text_content()
        assert float(shown) == pytest.approx(site["weights"][position], rel=5e-3)
    tabs.nth(0).click()


def test_a_click_on_the_legend_hides_a_method_everywhere_and_brings_it_back(page):
    key = page.locator("#curves .key").nth(1)
    lines = page.locator('.series[data-series="1"]')
    assert lines.count() >= 4
    key.click()
    assert not any(lines.nth(n).is_visible() for n in range(lines.count()))
    key.focus()
    page.keyboard.press("Enter")
    assert lines.nth(0).is_visible()


def test_pointing_at_the_legend_picks_a_method_out(page):
    def opacity(series):
        part = page.locator(f'#curves g.series[data-series="{series}"]').nth(0)
        return float(part.evaluate("e => getComputedStyle(e).opacity"))

    page.mouse.move(2, 2)
    page.locator("#curves").scroll_into_view_if_needed()
    page.locator("#curves .key").nth(1).hover()
    until(page, lambda: opacity(0) < 0.2)  # it fades
    assert opacity(1) == 1
    page.mouse.move(2, 2)
    until(page, lambda: opacity(0) == 1)


def test_no_labels_of_an_axis_touch(page):
    """Per drawing and line of text; the numbers in the cells and the legend included."""
    assert touching_words(page) == []


def touching_words(page):
    return page.evaluate(
        """() => [...document.querySelectorAll("figure:not([hidden]) svg")].flatMap((svg) => {
          const boxes = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBBox()]);
          const found = [];
          const room = svg.viewBox.baseVal.width;
          boxes.forEach(([a, p]) => {
            if (p.x < -0.5 || p.x + p.width > room + 0.5) found.push(`${svg.id}: ${a} | edge`);
          });
          boxes.forEach(([a, p], n) => boxes.slice(n + 1).forEach(([b, q]) => {
            const across = Math.min(p.x + p.width, q.x + q.width) - Math.max(p.x, q.x);
            const down = Math.min(p.y + p.height, q.y + q.height) - Math.max(p.y, q.y);
            if (across > 0.5 && down > 3) found.push(`${svg.id}: ${a} | ${b}`);
          }));
          return found;
        })"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_everything_is_seen_and_read_at_every_width(page, width, scheme):
    """Nothing is cut off, no words touch, nothing is too small to read or too faint to see."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    try:
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert touching_words(page) == []
        assert page.locator(".finding").bounding_box()["y"] < 300
        pictures = boxes(page, "figure:not([hidden]) svg")
        assert len(pictures) >= 4
        for name, left, right in pictures:
            assert left >= 0 and right <= width
            assert name.endswith("-narrow") == (width < 900)
        smallest, faintest = page.evaluate(READABILITY)
        assert smallest >= (6.4 if width > 900 else 9), "on a desktop as drawn, else larger"
        assert faintest >= 3.0
        if width < 900:
            cells = boxes(page, "#panel-results td")
            assert cells and all(left >= 0 and right <= width for _, left, right in cells)
            facet = page.data["hover"]["curves-narrow"]["facets"][0]
            x, y, wide, high = facet["box"]
            tip = point_at(page, "#curves-narrow", x + wide, y + high / 2)
            box = tip.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
            page.mouse.move(2, 2)
    finally:
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1180, "height": 1000})


def boxes(page, selector):
    """Name, left and right of all that is seen."""
    return page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)]
          .filter((e) => e.checkVisibility())
          .map((e) => [e.id, e.getBoundingClientRect().left, e.getBoundingClientRect().right])""",
        selector,
    )


READABILITY = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  let smallest = 99, faintest = 99;
  for (const text of document.querySelectorAll(
      "figure:not([hidden]) svg text.soft, figure:not([hidden]) svg text.ink, p, td")) {
    if (!text.checkVisibility()) continue;
    const style = getComputedStyle(text);
    const scale = text.ownerSVGElement ? text.getScreenCTM().a : 1;
    smallest = Math.min(smallest, parseFloat(style.fontSize) * scale);
    const own = light(text.ownerSVGElement ? style.fill : style.color);
    faintest = Math.min(faintest, (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05));
  }
  return [smallest, faintest];
}"""


def test_a_point_and_a_name_lead_to_their_run(page):
    """A click on a chart shows the run of the nearest line; so does the run's name in the table."""
    facet = page.data["hover"]["curves"]["facets"][0]
    x, y, width, height = facet["box"]
    low, high = facet["y_range"]
    for line in (facet["lines"][0], facet["lines"][-1]):
        share = 1 - (line["y"][-1] - low) / (high - low)
        point_at(page, "#curves", x + width, y + height * share)
        page.mouse.down()
        page.mouse.up()
        target = page.evaluate("location.hash")
        runs = {
            page.data["series"][n["series"]]["run"]
            for n in facet["lines"]
            if abs(n["y"][-1] - line["y"][-1]) < 1e-3 * (high - low)
        }
        assert int(target.removeprefix("#run-")) in runs
        name = page.data["runs"][int(target.removeprefix("#run-"))]["name"]
        assert name in page.locator(target).text_content()
        assert page.locator(target).is_visible()
    if len(page.data["runs"]) > 1:
        page.locator("#panel-results td.run a").last.click()
        last = page.data["series"][-1]["run"]
        assert page.evaluate("location.hash") == f"#run-{last}"


@pytest.mark.parametrize("form", ["svg", "png"])
def test_every_panel_can_be_saved(page, form, tmp_path):
    panels = ("curves", "maps", "sharpness", "magnitudes", "cost")
    for name in panels if form == "svg" else panels[:2]:  # drawing a picture takes a second
        with page.expect_download() as saved:
            page.locator(f'#panel-{name} button[data-format="{form}"]').click()
        path = tmp_path / saved.value.suggested_filename
        saved.value.save_as(path)
        content = path.read_bytes()
        assert content.startswith(b"<svg" if form == "svg" else b"\x89PNG")
        assert len(content) > 2000
        assert b"var(" not in content[:100_000]


def test_dark_and_print_have_their_own_colours(page):
    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert background() == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert background() != "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark", media="print")
    assert background() == "rgb(255, 255, 255)"
    assert page.locator("#panel-maps figure:visible").count() > 1
    assert not page.locator(".tools").nth(0).is_visible()
    page.emulate_media(color_scheme="light", media="screen")


INJECTED = """<img id="broken" src="data:,x" onerror="window.injected = 1">
<button id="handler" onclick="window.injected = 1" style="color: red">x</button>
<img src="https://example.com/x.png"><script>window.injected = 1</script>
<script src="data:text/javascript,window.injected=1"></script>
<style>body { background: red !important; }</style>"""


def test_the_policy_is_enforced_whatever_gets_into_the_page(browser, tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"))
    write_report([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").write_text(text.replace("<main>", f"<main>{INJECTED}", 1))
    page = browser.new_page()
    problems, stopped = [], {}
    page.on("console", lambda message: problems.append(message.text))
    page.on("requestfailed", lambda request: stopped.update({request.url: request.failure}))
    page.goto(f"file://{tmp_path / 'report.html'}")
    page.locator("#handler").click()
    until(
        page, lambda: stopped and sum("Content Security Policy" in text for text in problems) >= 6
    )
    assert page.evaluate("window.injected") is None
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert stopped["https://example.com/x.png"] == "csp"
    assert page.locator("#curves .key").count() == 2  # and the page itself still works
    page.locator("#curves .key").nth(0).click()
    assert page.locator("#curves .key.off").count() == 1
    page.close()
