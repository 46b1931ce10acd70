"""The schedule builder as a file in a real Chromium: by click, tap and key; what is wrong is said, and it goes on."""

import pytest
from browser_lab import PATIENCE_S

from simulator.viz.builder.builder import HERE, page_script
from simulator.viz.builder.levels import levels_json

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>builder</title><style>%s</style></head>
<body><main id="builder"><p>This needs JavaScript.</p></main><script>%s
window.show = (more) => distlabBuilder.render({ element: document.querySelector("#builder"), ...more });
show({ data: { levels: %s, level: "1", address: true } });</script></body></html>"""
FULL = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3;1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"
WIN, SECOND = "FFFFvFBFBFBFBvBBBB", "FFFFvFFFFvFFFFvFFFFBBBB" + "vvvBBBB" * 3  # v: a rank down
HERE_ARE = "Here are 1 to 16 ranks, 1 to 64 micro-batches, 1 to 4 stages per rank; shown are"
BAD = {
    "#nonsense": "The address names no level; here is level 1.",
    "#" + "x" * 10**5: "The address is too long for a schedule; here is level 1.",
    "#level=3&s=%E0%A4%A": "The address holds no schedule: URI malformed",
    "#level=1&s=GPipe(4)": "The address holds no schedule: line 1, column 1: 'GPipe(4)' is not an action",
    "#level=1&s=0F0,0F1;1B0": "The address's schedule stops here: B of micro-batch 0 on rank 1 needs its own F first.",
    "#level=1&t=1,x,1,0": "The address's times are 4 numbers from 0 to 8; here are the usual ones.",
    "#level=own&p=0&m=1000&h=02": f"{HERE_ARE} 4, 8, 1.",
    "#level=own&p=2&m=1&h=0110&s=0F0,3F0,3B0,0B0;1F0,2F0,2B0,1B0": "Done in 12 ms. 50.0 % idle",
    f"#level=1&s={FULL}": "Done in 15 ms, par! 20.0 % idle, a rank holds at most 4.",
}
NO_ANSWER = """(text) => show({ model: { values: { text, data: { levels: [], level: {}, text } }, on() {}, set() {},
    get(name) { return this.values[name]; }, save_changes() {}, send() {} } })"""
SIZES = "all => all.map((one) => [one.offsetWidth, one.offsetHeight]).filter(([width]) => width)"
FORBID = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('forbidden'); } })"


@pytest.fixture
def open_page(tmp_path, chromium):
    """Open the builder in a page, which may not complain."""
    path, contexts, complaints = tmp_path / "page.html", [], []
    path.write_text(PAGE % (HERE.with_name("builder.css").read_text(), page_script(), levels_json()))

    def show(fragment="", context=None, script="", **options):
        contexts.append(context or chromium.new_context(**options))
        contexts[-1].add_init_script(script)
        contexts[-1].set_default_timeout(PATIENCE_S * 1000)
        page = contexts[-1].new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri() + fragment)
        return page

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


def keys(page, text):
    page.locator("canvas").focus()
    for key in text:
        page.keyboard.press({"v": "ArrowDown", "<": "ArrowLeft"}.get(key, key))


def line(page):
    return page.locator(".line").inner_text()


def tabs(page):
    return page.locator("nav").inner_text().split("\n")


def test_a_schedule_is_built_by_click_and_key_and_read_from_its_address_without_a_star(open_page):
    page = open_page()
    page.locator("canvas").click(position={"x": 100, "y": 40})
    assert line(page).startswith("0F0: forward of micro-batch 0, stage 0; 0 ms to 1 ms, the first")
    keys(page, "B")
    assert line(page) == "B of micro-batch 0 on rank 0 needs rank 1's B first"
    page.get_by_role("button", name="forward of micro-batch 1, stage 0").click()
    keys(page, "uu" + WIN + "<<")
    assert line(page) == "rank 0 idles: 0B3 waits for 1B3 on rank 1, which ran after 1F3"
    assert (tabs(page)[0], "par 15 ms" in page.locator(".score").inner_text()) == ("1 ★", True)
    page.wait_for_function("(text) => location.hash.endsWith(text)", arg=f"s={FULL}")
    read = open_page("#" + page.url.partition("#")[2])
    assert (tabs(read)[0], "start over to win the star" in line(read)) == ("1", True)
    read.get_by_role("button", name="Critical path").click()
    assert line(read).startswith("Critical path: 0F0 → 1F0 → 1B0 → 1F1")


def test_a_bad_address_and_a_bad_text_are_told_and_the_builder_goes_on(open_page):
    for fragment, words in BAD.items():
        page = open_page(fragment)
        assert line(page).startswith(words)
    page.get_by_role("button", name="Start over").click()
    page.locator("summary").last.click()
    for text, words in (("0F0 0F1\n1F0 1X1", "line 2, column 5: '1X1' is not"), ("0F0\n" * 1000, "the text has 1000")):
        page.locator("textarea").fill(text)
        page.get_by_role("button", name="Read this text").click()
        assert line(page).startswith(words)
    keys(page, WIN)
    assert (line(page)[:17], tabs(page)[0]) == ("Done in 15 ms, pa", "1 ★")


def test_two_tabs_keep_both_stars_and_forbidden_storage_is_told(open_page):
    first = open_page()
    second = open_page(context=first.context)
    keys(first, WIN)
    second.get_by_role("button", name="level 2").click()
    keys(second, SECOND)
    assert tabs(second)[:2] == ["1 ★", "2 ★"]
    first.wait_for_function("document.querySelector('nav').textContent.startsWith('1 ★2 ★')")
    page = open_page(script=FORBID)
    keys(page, WIN)
    assert (tabs(page)[0], "This browser forbids to keep stars" in line(page)) == ("1 ★", True)


def test_a_kernel_that_does_not_answer_is_told_and_the_builder_goes_on(open_page):
    page = open_page()
    page.clock.install()
    page.evaluate(NO_ANSWER, FULL.replace(";", "\n"))
    page.get_by_role("button", name="Run on real ranks").click()
    assert line(page) == "Asked the kernel to run it on 2 real ranks."
    page.clock.fast_forward(6000)
    assert line(page).startswith("The kernel does not answer")
    assert page.locator("code").inner_text() == "distlab lab 09 --ranks 2 --schedule my_order.txt"
    keys(page, "u")
    assert line(page) == "Took back 0B3."


def test_a_phone_shows_all_of_it_and_without_javascript_words_stand_there(open_page):
    page = open_page("#level=8", viewport={"width": 390, "height": 800}, has_touch=True)
    page.touchscreen.tap(100, page.locator("canvas").bounding_box()["y"] + 40)
    assert line(page).startswith("0F0: forward")
    page.locator("summary").first.click()
    sizes = page.locator("button, input, summary").evaluate_all(SIZES)
    assert (page.evaluate("document.documentElement.scrollWidth") <= 390, len(sizes) > 30) == (True, True)
    assert min(min(one) for one in sizes) >= 24
    assert open_page(java_script_enabled=False).locator("main").inner_text() == "This needs JavaScript."
