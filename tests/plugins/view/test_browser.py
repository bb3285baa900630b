"""The viewer in a real browser. Each test ends with a check that no text of a rollout was executed."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from roundhouse.health.errors import ErrorReporter
from roundhouse.health.heartbeat import Heartbeat
from roundhouse.plugins.view.catalog import Scope
from roundhouse.plugins.view.server import export_page
from tests.plugins.view.conftest import SLOWER, viewing
from tests.sql.stores import HOSTILE, write_run
from tests.waiting import until

pytestmark = pytest.mark.real

CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((k) => top[k] * top[3] + below[k] * (1 - top[3])).concat(1);
  const light = (c) => { const [r, g, b] = c.map((v) => v / 255).map((v) =>
    v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const found = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility({ opacityProperty: true })) continue;
    if (element.closest("svg, dialog, noscript, .charttip")) continue;
    const chain = []; for (let each = element; each; each = each.parentElement) chain.unshift(each);
    const ground = chain.reduce((below, each) => over(rgba(getComputedStyle(each).backgroundColor), below), [255, 255, 255, 1]);
    const ink = rgba(getComputedStyle(element).color);
    ink[3] *= chain.reduce((all, each) => all * Number(getComputedStyle(each).opacity), 1);
    const [a, b] = [light(over(ink, ground)), light(ground)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = `${element.tagName.toLowerCase()}.${element.className}: ${text.slice(0, 30)}`;
    if (ratio < (found.get(name) ?? 99)) found.set(name, Math.round(ratio * 100) / 100);
  }
  return [...found];
}"""
"""Of each text in sight, its contrast to what lies behind it, as WCAG 2 computes it."""


def open_page(page: Any, url: str, query: str) -> None:
    page.goto(f"{url}?{query}")
    page.wait_for_selector("body.ready")


def rows(page: Any) -> list[str]:
    return page.eval_on_selector_all(".rows .row[data-rollout]", "rows => rows.map(row => row.dataset.rollout)")


def wait_for_rows(page: Any, count: int) -> None:
    page.locator(".rows .row[data-rollout]").nth(count - 1).wait_for()
    page.locator(".rows .row[data-rollout]").nth(count).wait_for(state="detached")


@pytest.mark.smoke("browser")
def test_the_newest_run_is_shown_with_its_rollouts(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2")
    page.wait_for_selector(".rows .row[data-rollout]")
    assert len(rows(page)) == 12
    assert "12 rollouts" in page.inner_text(".tablenote")
    assert page.locator(".timeline svg circle").count() >= 2


def test_keys_move_open_and_close_and_the_address_says_it_all(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2")
    page.wait_for_selector(".rows .row[data-rollout]")
    for key in ("j", "j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".pane h2")
    assert page.inner_text(".pane h2") == "sum/0 / 1"
    page.keyboard.press("j")
    page.wait_for_selector(".pane h2:has-text('sum/0 / 2')")
    page.keyboard.press("l")
    page.wait_for_selector(".channel.on:text('log-probability')")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(".stream .t-logprob")
    assert page.inner_text(".pane h2") == "sum/0 / 2"
    page.keyboard.press("Escape")
    page.wait_for_selector(".pane h2", state="detached")
    assert "rollout=" not in page.url


def test_filters_search_and_sort(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2")
    page.click(".chip:has-text('failed')")
    wait_for_rows(page, 1)
    page.click(".clear")
    page.keyboard.press("/")
    page.keyboard.type("What is 1 + 2?")
    wait_for_rows(page, 4)
    assert {name.rsplit("/", 1)[0] for name in rows(page)} == {"sum/1"}
    page.keyboard.press("Escape")
    page.click(".head .c-sample")
    page.wait_for_selector(".rows .row:first-child[data-rollout='sum/1/0']")
    assert "sort=sample" in page.url


def test_only_rows_in_sight_are_in_the_document(page: Any, url: str) -> None:
    open_page(page, url, "run=wide&iteration=1")
    page.wait_for_selector(".rows .row[data-rollout]")
    assert "400 rollouts" in page.inner_text(".tablenote")
    assert len(rows(page)) < 80
    page.evaluate("document.querySelector('.scroller').scrollTop = 1e9")
    page.wait_for_selector(".rows .row[data-rollout='sum/99/3']")
    assert len(rows(page)) < 80


def test_what_a_rollout_says_is_shown_and_never_run(page: Any, url: str) -> None:
    open_page(page, url, "run=b&iteration=2&rollout=sum/1/1&at=2")
    for tab in ("Conversation", "Tokens", "Group", "Task & record"):
        page.click(f".tabs a:text-is('{tab}')")
        page.wait_for_selector(".tab > *")
    page.click(".tabs a:text-is('Conversation')")
    assert HOSTILE in page.inner_text(".pane .conversation")
    page.click(".row[data-rollout='sum/0/3']")
    page.wait_for_selector(".notice.bad")
    assert HOSTILE in page.inner_text(".notice.bad")
    page.fill(".search", HOSTILE)
    wait_for_rows(page, 12)
    page.click("a.view:text-is('Quarantine')")
    page.wait_for_selector(".refusal")
    page.click("a.view:text-is('Compare')")
    page.select_option("select[aria-label='B run']", "a")
    page.wait_for_selector(".task")
    page.click(".task >> nth=0")
    page.wait_for_selector(".side .column")
    assert page.locator("img, .pane script, .other script").count() == 0


def test_a_press_in_the_midst_of_a_redraw_is_not_lost(page: Any, url: str) -> None:
    open_page(page, url, "run=b&iteration=2")
    page.fill(".search", "no such text")
    page.hover("a.view:text-is('Quarantine')")
    page.mouse.down()
    page.wait_for_url("**q=no+such+text**")  # what was typed has been taken up, and the links redrawn with it
    page.mouse.up()
    page.wait_for_selector(".refusal")


def test_a_late_answer_does_not_cover_the_view_that_is_shown_by_now(page: Any, url: str) -> None:
    late: list[Any] = []
    page.route("**/api/quarantine**", lambda route: late.append(route))
    open_page(page, url, "run=b&iteration=2")
    page.click("a.view:text-is('Quarantine')")
    page.wait_for_url("**view=quarantine**")
    page.click("a.view:text-is('Compare')")
    page.wait_for_selector("select[aria-label='B run']")
    with page.expect_response("**/api/quarantine**"):
        late[0].continue_()
    page.evaluate("() => new Promise((done) => setTimeout(done, 200))")
    assert page.locator(".compare").count() == 1
    assert page.locator(".quarantine").count() == 0


def test_tokens_are_coloured_by_what_was_trained(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2&rollout=sum/1/1&at=2&tab=tokens")
    page.wait_for_selector(".stream .tok")
    trained = page.eval_on_selector_all(".t-mask[data-k]", "tokens => tokens.map(token => token.textContent).join('')")
    assert trained == "I call the calculator.<|im_end|>The answer is 7.<|im_end|>"
    page.keyboard.press("r")
    page.wait_for_selector(".legend.tokens:has-text('largest difference 0.01 nats')")
    page.hover(".block.said .tok")
    assert "1.01005" in page.inner_text(".tokenview > .facts")


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ("run=a&iteration=3&rollout=sum/0/0&at=3", "Stage validate of iteration 3 is not complete."),
        ("run=a&iteration=2&rollout=sum/1/0&at=2", "Kept from training: masked_by_environment."),
    ],
)
def test_what_does_not_exist_is_said(page: Any, url: str, rollout: str, told: str) -> None:
    open_page(page, url, f"{rollout}&tab=tokens")
    page.wait_for_selector(".missing")
    assert told in page.inner_text(".missing")
    page.keyboard.press("l")
    page.wait_for_selector(".t-logprob[data-k]")


def test_what_is_not_there_is_told_in_the_page(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2&rollout=sum/9/9&at=2")
    page.wait_for_selector(".pane .empty")
    assert "no rollout 'sum/9/9'" in page.inner_text(".pane")


def test_what_the_run_cost_is_said_over_its_iterations(browser: Any, tmp_path: Path) -> None:
    run = write_run(str(tmp_path), "r", iterations=2, cost={"prices": {"currency": "EUR"}})
    for iteration in (1, 2):
        totals = {"wall_hours": 0.5 * iteration, "gpu_hours": 3.0, "generated_tokens": 2000.0, "money": 1.25}
        totals |= {"waste/failed_tokens": 150.0, "waste/untrained_tokens": 50.0}
        run.begin(run.stage(iteration, "report"), policy_version=iteration).commit(details={"totals": totals})
    with viewing(str(tmp_path)) as url:
        context = browser.new_context(viewport={"width": 1400, "height": 850})
        shown = context.new_page()
        open_page(shown, url, "run=r&iteration=2")
        shown.wait_for_selector(".timeline .cost:has-text('GPU')")
        assert (
            shown.inner_text(".timeline .cost")
            == "iterations: 60 min · GPU 3 h · 2K tokens, 10 % not learnt from · 1.25 EUR"
        )
        shown.hover(".timeline svg circle >> nth=0")
        shown.wait_for_selector(".charttip:has-text('iterations: 30 min')")
        context.close()


def test_both_themes(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.keyboard.press("t")
    assert page.evaluate(colour) != light
    page.reload()
    page.wait_for_selector("body.ready")
    assert page.evaluate(colour) != light


PLACES = {
    "rollouts": ("run=a&iteration=2", ".rows .row[data-rollout]"),
    "conversation": ("run=a&iteration=2&rollout=sum/0/0&at=2", ".pane .conversation"),
    "tokens": ("run=a&iteration=2&rollout=sum/0/0&at=2&tab=tokens", ".pane .block"),
    "group": ("run=a&iteration=2&rollout=sum/0/0&at=2&tab=group", ".pane .columns"),
    "quarantine": ("run=a&iteration=2&view=quarantine", ".other section"),
    "compare": ("run=a&iteration=1&view=compare&b_iteration=2", ".other .task"),
    "replays": ("run=a&iteration=2&view=replays", ".other .replay"),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_text_stands_out_from_what_lies_behind_it_as_aa_asks(page: Any, url: str, place: str) -> None:
    query, there = PLACES[place]
    faint = []
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        open_page(page, url, query)
        page.locator(there).first.wait_for()
        measured = page.evaluate(CONTRASTS)
        assert len(measured) > 10
        faint += [(theme, name, ratio) for name, ratio in measured if ratio < 4.5]
    assert faint == []


def test_a_masked_sample_does_not_count_in_the_mean_of_its_group(page: Any, url: str) -> None:
    """The first of its four rewards, 1 1 0 0, is masked."""
    open_page(page, url, "run=a&iteration=2&rollout=sum/1/0&at=2&tab=group")
    page.wait_for_selector(".groupnote:has-text('4 samples, mean reward 0.333')")


def test_a_stopped_run_opens_on_its_newest_rollouts_and_says_where_it_stopped(browser: Any, tmp_path: Path) -> None:
    run = write_run(str(tmp_path), "r", iterations=2)
    run.begin(run.stage(3, "refit"), policy_version=2).commit()
    (tmp_path / "runs/r/iterations/000003/collect").mkdir()
    with suppress(KeyboardInterrupt), Heartbeat(run.location, ErrorReporter(), 60.0):
        raise KeyboardInterrupt
    with viewing(str(tmp_path)) as url:
        context = browser.new_context(viewport={"width": 1440, "height": 850})
        shown = context.new_page()
        open_page(shown, url, "run=r")
        wait_for_rows(shown, 12)
        assert "iteration=2" in shown.url
        assert shown.inner_text(".notices").endswith("ago in collect of iteration 3")
        assert shown.inner_text(".notices").startswith("stopped ")
        context.close()


def test_the_line_ends_where_its_box_ends_at_every_width(browser: Any, tmp_path: Path) -> None:
    run = write_run(str(tmp_path), "r", iterations=2, tasks=1)
    totals = {
        "wall_hours": 5.0,
        "cpu_hours": 3.0,
        "gpu_hours": 3.0,
        "generated_tokens": 2000.0,
        "waste/failed_tokens": 150.0,
    }
    run.begin(run.stage(2, "report"), policy_version=2).commit(details={"totals": totals})
    right_ends = """() => [".chart", ".chart svg", ".chart circle.now"].map((one) =>
        document.querySelector(one).getBoundingClientRect().right)"""
    fits = "() => document.querySelector('.chart svg').clientWidth === document.querySelector('.chart').clientWidth"
    with viewing(str(tmp_path)) as url:
        context = browser.new_context(viewport={"width": 1440, "height": 850})
        shown = context.new_page()
        open_page(shown, url, "run=r&iteration=2")
        shown.wait_for_selector(".timeline .cost:has-text('GPU')")
        for width in (1440, 1000, 1440):
            shown.set_viewport_size({"width": width, "height": 850})
            until(lambda: shown.evaluate(fits), "a line that is drawn again")
            box, line, point = shown.evaluate(right_ends)
            assert point <= line <= box + 0.5, width
        context.close()


def test_compare_fits_a_telephone_with_whole_menus_and_names(page: Any, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    open_page(page, url, "run=a&iteration=1&view=compare&b_run=a&b_iteration=2&b_stage=collect")
    page.locator(".task").first.wait_for()
    right = "all => Math.max(...all.map((one) => one.getBoundingClientRect().right))"
    assert page.eval_on_selector_all(".picker select", right) <= 390
    cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
    assert page.eval_on_selector_all(".task .name", cut) == []


@pytest.mark.parametrize("width", [390, 800])
def test_on_a_narrow_page_nothing_lies_beside_it_or_over_something_else(page: Any, url: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    open_page(page, url, "run=a&iteration=2")
    page.locator(".timeline svg").wait_for()
    wait_for_rows(page, 12)
    page.wait_for_function("document.fonts.status === 'loaded'")
    assert page.evaluate("document.querySelector('.top').scrollWidth") <= width
    # what is in a cell is cut by the cell, with an ellipsis
    wide = """width => [...document.querySelectorAll("body *")].filter((one) => !one.parentElement.closest(".cell"))
        .filter((one) => one.getBoundingClientRect().right > width + 0.5)
        .map((one) => `${one.tagName}.${one.className.baseVal ?? one.className}`)"""
    assert page.evaluate(wide, width) == []
    boxes = page.eval_on_selector_all(
        ".top a, .top button, .top select, .timeline svg, .timeline .all",
        "all => all.map(one => { const b = one.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })",
    )
    assert all(left >= 0 and right <= width for left, _, right, _ in boxes)
    chart, button = boxes[-2:]
    assert chart[2] <= button[0], "the chart ends where the button begins"


def test_compare_opens_on_the_first_and_the_last_iteration_and_says_that_it_loads(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2&view=quarantine")
    page.locator(".other section").wait_for()
    held: list[Any] = []
    page.route("**/api/compare*", lambda route: held.append(route))
    page.get_by_role("link", name="Compare").click()
    page.wait_for_selector(".compare[aria-busy=true]:has-text('Comparing')")
    assert page.locator(".refusal").count() == 0, "nothing of the tab before"
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    page.locator(".other .task").first.wait_for()
    chosen = page.eval_on_selector_all(".picker select", "all => all.map(one => one.value)")
    assert chosen == ["a", "1", "collect", "a", "2", "collect"]


def test_rollouts_are_filtered_by_what_became_of_them_in_training(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2")
    wait_for_rows(page, 12)
    page.get_by_label("learning").select_option("refused")
    page.locator(".rows .row:has(.tag)").first.wait_for()
    page.wait_for_selector(".tablenote:has-text('of 12 rollouts')")
    refused = len(rows(page))
    page.get_by_label("learning").select_option("trained")
    page.locator(".rows .row .c-advantage:has(.dim)").first.wait_for(state="detached")
    trained = len(rows(page))
    assert 0 < refused < 12
    assert 0 < trained <= 12 - refused
    assert "learning=trained" in page.url


def test_a_press_on_a_row_opens_it_though_the_rows_are_read_again_meanwhile(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2")
    page.hover(".row[data-rollout='sum/0/3']")
    page.mouse.down()
    page.evaluate("document.querySelector('.scroller').dispatchEvent(new Event('scroll'))")
    page.mouse.up()
    page.wait_for_selector(".row.open[data-rollout='sum/0/3']")


def test_an_exported_page_needs_nobody(page: Any, store: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    export_page(store, Scope("b", 2, "collect"), file, largest=100)
    page.context.set_offline(True)
    page.goto(f"file://{file}")
    page.wait_for_selector("body.ready .rows .row[data-rollout]")
    assert len(rows(page)) == 12
    page.fill(".search", "1 + 2?")
    wait_for_rows(page, 4)
    page.click(".row[data-rollout='sum/1/1']")
    page.wait_for_selector(".pane .conversation")
    assert HOSTILE in page.inner_text(".pane")
    page.keyboard.press("a")
    page.wait_for_selector(".t-pos[data-k], .t-neg[data-k]")
    assert str(tmp_path.parent) not in file.read_text()


def test_a_dataset_stands_beside_the_runs_with_its_nights_for_iterations(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2")
    page.select_option("select.run", label="dataset nightly")
    page.wait_for_selector("span.iteration:text('20261122T020000Z-v000001')")
    wait_for_rows(page, 8)
    assert page.locator("nav.switch").count() == 0
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("span.iteration:text('20261121T020000Z-v000000')")
    where = page.locator(".where:has-text('datasets/nightly · 20261121T020000Z-v000000')")

    def opened() -> bool:  # a click that came before the version's rows opened one of the version before
        page.click(".rows .row[data-rollout] >> nth=0")
        page.wait_for_timeout(300)
        return bool(where.count())

    until(opened, "a rollout of the version")
    page.click("button.all")
    page.wait_for_selector("span.iteration:text('all versions')")
    wait_for_rows(page, 16)


def test_replays_of_a_run_are_shown_with_what_differs_and_why(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2")
    page.click(".views a:text-is('Replays')")
    shown = page.locator(".replay", has_text="slower")
    shown.locator(".compared").nth(1).wait_for()
    assert SLOWER in shown.inner_text()
    equal, differs = (shown.locator(".compared").nth(place).inner_text() for place in (0, 1))
    assert "train 1" in equal
    assert "equal" in equal
    for told in (
        "train 2",
        "differs",
        "learning_rate 0.1 -> 0.01",
        "columns: 5 of 12 rows changed (advantage)",
        "0.25 → 0.5",
    ):
        assert told in differs
    assert "has not finished" in page.locator(".replay", has_text="open").inner_text()
    open_page(page, url, "run=b&iteration=2&view=replays")
    page.wait_for_selector("text=No replay of this run")


def test_a_turn_has_the_command_that_branches_it_and_branches_are_shown(page: Any, url: str) -> None:
    open_page(page, url, "run=a&iteration=2&rollout=sum/1/1&at=2")
    page.click(".turn footer button:text-is('branch') >> nth=0")
    command = page.locator(".turn .command:visible")
    assert command.inner_text() == "roundhouse branch a --iteration 2 --rollout sum/1/1 --turn 0 --name branches"
    open_page(page, url, "run=datasets/branches&iteration=2")
    page.wait_for_selector("span.iteration:text('a-i000002-v000001-0123abcd')")
    wait_for_rows(page, 8)
    page.click(".rows .row[data-rollout] >> nth=0")
    page.wait_for_selector(".turn footer")
    assert page.locator(".turn footer button").count() == 0
