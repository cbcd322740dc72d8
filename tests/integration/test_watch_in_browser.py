"""`posttrain watch` in a real Chromium: what a user sees and does, and that nothing leaves the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsers import Visit, chromium, visiting, watching
from made_runs import append, conversation_group, make_run, write_attempt, write_groups, write_step

from posttrain.apps.watch.access import Access

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SHOTS = os.environ.get("POSTTRAIN_WRITE_SCREENSHOTS")  # set by `make screenshots`: the pictures of docs/watch.md
TOKEN = "a-token-of-many-characters"
FAR_FUTURE = 4e9  # a heartbeat that does not grow old
# When a tile shows step 13, in milliseconds after this is evaluated.
WHEN_SEEN = """() => {
  window.seen = new Promise((done) => {
    const start = performance.now();
    const look = () => [...document.querySelectorAll(".tile .value")].some((one) => one.innerText.startsWith("13"))
      && done(performance.now() - start);
    new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true });
  });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("results")
    make_run(home / "good")
    make_run(home / "high-lr", sick=True, title="GRPO of Qwen3-0.6B, high lr")
    attacked = make_run(home / "tools", steps=2, title='<img src=x onerror="window.attacked = true">')
    write_groups(attacked, 2, [conversation_group()])
    return home


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    with watching(home) as found:
        yield found


def test_runs_lead_to_a_run_with_curves_thresholds_and_marks(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        visit.go("/", "text=high-lr")
        visit.page.get_by_role("link", name="high-lr", exact=True).click()
        visit.page.locator(".chart svg .smooth").first.wait_for()
        chart = visit.page.locator("#chart-KL-to-the-reference")
        assert chart.locator(".threshold.error").count() == 1
        assert chart.locator(".found.error").count() == 1
        assert chart.locator(".resumed").count() == 1
        assert chart.locator(".saved").count() == 3
        assert "error" in visit.page.locator(".vital", has_text="KL to the reference").inner_text()
        assert "policy.optimizer.kwargs.lr=1e-6" in visit.page.locator(".finding").first.inner_text()
        picture(visit, "watch-run.png")


def test_step_that_is_written_appears_within_two_seconds(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "live", steps=12, status="running")
    write_attempt(folder, ended=False, heartbeat=FAR_FUTURE)
    with watching(tmp_path) as address, visiting(browser, address) as visit:
        visit.go(f"/run/{visit.run('live')}", ".chart svg .smooth, .chart svg .raw")
        steps = visit.page.locator(".tile", has=visit.page.get_by_text("Steps", exact=True)).locator(".value")
        assert steps.inner_text().startswith("12")
        visit.page.locator("#live.on").wait_for()
        # The browser measures: a test must not fail because this machine is busy, only because nothing comes.
        visit.page.evaluate(WHEN_SEEN)
        write_step(folder, 13)
        took_ms = visit.page.evaluate("() => window.seen")
        print(f"a new step was visible after {took_ms:.0f} ms")
        finding = {"step": 13, "rule": "r", "severity": "error", "metric": "train/reward", "value": 1.0, "source": "s"}
        finding |= {"text": "it is sick", "fixes": [], "answers": [], "last_step": 13}
        append(folder / "findings.jsonl", finding)
        visit.page.locator(".finding", has_text="It is sick").wait_for()


def test_search_in_all_steps_and_filters(browser: Browser, address: str) -> None:
    from playwright.sync_api import expect

    with visiting(browser, address) as visit:
        page = visit.page
        visit.go(f"/run/{visit.run('good')}/rollouts?step=7", ".group-row")
        assert page.locator(".group-row").count() == 6
        page.get_by_label("Where to search").select_option("all")
        page.get_by_label("Search prompts and answers").fill("STICKERS")
        page.keyboard.press("Enter")
        page.locator(".group-row mark").first.wait_for()
        page.get_by_text("groups found").wait_for()
        assert all("stickers" in text.lower() for text in page.locator(".group-row .text").all_inner_texts())
        page.get_by_role("button", name="clear").click()
        page.locator(".filters summary").click()
        page.get_by_label("Reward from").fill("1")
        page.keyboard.press("Tab")
        page.get_by_text("of 6 groups").wait_for()
        expect(page.locator(".answer")).to_have_count(4, timeout=60_000)
        assert page.locator(".answer:not(.other) .reward").first.inner_text() == "1.1"


def test_two_answers_word_by_word(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.page
        visit.go(f"/run/{visit.run('good')}/rollouts?step=7&group=0", ".answer")
        compare = page.locator(".answer").get_by_role("button", name="compare")
        compare.nth(0).click()
        page.locator("#pinned").get_by_text("answer 1").wait_for()
        compare.nth(1).click()
        page.locator(".diff").first.wait_for()
        left, right = page.locator(".diff").all_inner_texts()
        assert "Let me think step by step" in left
        assert "Let me think step by step" in right
        changed = page.locator(".diff del").all_inner_texts()
        assert all("think" not in text for text in changed)


def test_one_prompt_over_steps_and_in_another_run(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.page
        visit.go(f"/run/{visit.run('good')}/rollouts?step=57&group=0", ".answer")
        page.get_by_role("button", name="this prompt over steps").click()
        page.locator(".over-steps a", has_text="step 1").first.wait_for()
        assert page.locator(".over-steps").get_by_text("this one").count() == 1
        page.get_by_label("This prompt in another run").select_option(label="high-lr")
        page.get_by_role("heading", name="This prompt in high-lr").wait_for()
        page.locator(".over-steps").get_by_text("word diff").first.click()
        page.locator(".diff").first.wait_for()
        assert "high-lr" in page.locator(".side.a").inner_text()
        assert "good" in page.locator(".side.b").inner_text()


def test_tokens_are_coloured_by_each_number(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.page
        visit.go(f"/run/{visit.run('good')}/rollouts?step=50&group=1", ".answer")
        page.get_by_role("button", name="tokens").first.click()
        seen = set()
        for mode in ("logprob", "difference", "kl", "advantage"):
            page.get_by_label("Colour tokens by").select_option(mode)
            tokens = page.locator(f'.tokens[data-mode="{mode}"] .tok')
            tokens.first.wait_for()
            colours = tuple(tokens.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)"))
            assert len(set(colours)) > (0 if mode == "advantage" else 3)
            seen.add(colours)
        assert len(seen) == 4
        page.get_by_label("Colour tokens by").select_option("logprob")
        picture(visit, "watch-rollouts.png")


def test_conversations_have_turns_and_text_of_models_is_inert(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.page
        for path, until in (
            ("/", "text=tools"),
            (f"/run/{visit.run('tools')}", ".tile"),
            (f"/run/{visit.run('tools')}/rollouts?step=2&group=0", ".turn.environment"),
            (f"/run/{visit.run('tools')}/rollouts?q=onerror&in=all", "mark"),
        ):
            visit.go(path, until)
            assert page.evaluate("window.attacked") is None
            assert page.locator("img").count() == 0
            assert page.locator("main script").count() == 0
        visit.go(f"/run/{visit.run('tools')}/rollouts?step=2&group=0", ".turn.environment")
        roles = [one.split()[0] for one in page.locator(".turn > b").all_inner_texts()]
        assert roles == ["assistant", "tool", "assistant"]
        assert "<img src=x onerror=" in page.locator(".turn.model").nth(1).inner_text()


def test_runs_are_compared_in_one_chart_with_their_settings(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.page
        visit.go("/", "text=high-lr")
        for name in ("good", "high-lr"):
            page.get_by_label(f"Choose {name} to compare").check()
        page.get_by_role("link", name="Compare 2 runs").click()
        page.locator(".chart .smooth.s1").first.wait_for()
        assert page.locator(".chart").first.locator(".smooth").count() == 2
        row = page.locator(".differences tbody tr")
        row.wait_for()
        assert row.count() == 1
        assert "policy.optimizer.kwargs.lr" in row.inner_text()


def test_doctor_config_and_cluster_pages(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        page, run = visit.page, visit.run("high-lr")
        visit.go(f"/run/{run}/doctor", ".finding")
        page.get_by_role("button", name="Examine the whole run again").click()
        page.locator(".finding", has_text="truncated").first.wait_for()
        visit.go(f"/run/{run}/config?with={visit.run('good')}", ".differences")
        assert "1e-06" in page.locator(".differences").inner_text()
        visit.go(f"/run/{run}/cluster", "text=node-b")
        assert page.locator("section", has_text="Workers").locator("tbody tr").count() >= 4
        for path in ("/pipelines", "/registry"):
            visit.go(path, ".empty")


def test_keyboard_is_enough(browser: Browser, address: str) -> None:
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    with visiting(browser, address) as visit:
        page = visit.page
        visit.go(f"/run/{visit.run('good')}/rollouts?step=30", ".group-row[aria-current]")
        page.locator(".answer").first.wait_for()
        chosen = page.locator(".group-row[aria-current]")
        expect(chosen).to_have_attribute("data-at", "30/0")
        page.keyboard.press("j")
        expect(chosen).to_have_attribute("data-at", "30/1")
        page.keyboard.press("ArrowRight")
        expect(page.get_by_label("Step number")).to_have_value("31")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.type") == "search"
        visit.go(f"/run/{visit.run('good')}", ".chart svg")
        page.locator(".chart svg").first.focus()
        for key in ("ArrowLeft", "ArrowLeft"):
            page.keyboard.press(key)
        assert page.locator(".chart .at").first.inner_text() == "step 59"
        page.keyboard.press("Enter")
        page.locator(".group-row").first.wait_for()
        assert "step=59" in page.url
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_narrow_screens_show_everything_without_scrolling_sideways(browser: Browser, address: str) -> None:
    with visiting(browser, address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as visit:
        run, other = visit.run("high-lr"), visit.run("good")
        for path, until in (
            ("/", "text=high-lr"),
            (f"/run/{run}", ".chart svg"),
            (f"/run/{run}/rollouts?step=9", ".group-row"),
            (f"/run/{run}/rollouts?step=50&group=2", ".answer"),
            (f"/run/{run}/doctor", ".finding"),
            (f"/run/{run}/config?with={other}", ".differences"),
            (f"/run/{run}/cluster", "text=node-b"),
            (f"/compare?run={run}&run={other}", ".chart svg"),
            (f"/diff?a={run}:train:5:0:0&b={other}:train:9:0:1", ".diff"),
        ):
            visit.go(path, until)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390, path
        visit.go(f"/run/{run}/rollouts?step=50&group=2", ".answer")
        assert not visit.page.locator(".group-row").first.is_visible(), "the group takes the screen"
        visit.page.get_by_role("link", name="← groups").click()
        visit.page.locator(".group-row").first.wait_for()


CONTRAST = (Path(__file__).parents[1] / "contrast.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(browser: Browser, address: str, scheme: str) -> None:
    with visiting(browser, address, color_scheme=scheme) as visit:
        run = visit.run("high-lr")
        for path, until in (
            ("/", "text=high-lr"),
            (f"/run/{run}", ".chart svg"),
            (f"/run/{run}/rollouts?step=9", ".answer"),
        ):
            visit.go(path, until)
            assert visit.page.evaluate(CONTRAST) == [], path
        colour = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        shade = sum(visit.page.evaluate(colour)[:3])
        assert shade > 600 if scheme == "light" else shade < 200


def test_browser_is_asked_for_the_token_once(browser: Browser, home: Path) -> None:
    with watching(home, Access(TOKEN)) as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        page.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("This is not the token").wait_for()
        assert page.locator("text=high-lr").count() == 0
        page.get_by_label("Token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.locator("text=high-lr").first.wait_for()
        again = context.new_page()
        again.goto(address)
        again.locator("text=high-lr").first.wait_for()
        context.close()


def picture(visit: Visit, name: str) -> None:
    """A picture for the documentation, where it is asked for."""
    if SHOTS:
        visit.page.wait_for_timeout(300)
        visit.page.screenshot(path=IMAGES / name, clip={"x": 0, "y": 0, "width": 1440, "height": 1000}, full_page=True)
