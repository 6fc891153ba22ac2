"""The live page in headless Chromium against real servers: its numbers, its states, its API key."""

import concurrent.futures
import os
import shutil
import signal

import httpx
import pytest
from s3r_sglang.rl_integration.weights import WeightSender
from support import groups, prompt, stats

pytestmark = pytest.mark.slow

WIDTHS = {"laptop": (1280, 720), "phone": (390, 844)}


@pytest.fixture(scope="module")
def chromium():
    """A headless browser; Debian's, because Playwright's own build is not in a package registry."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        # Chromium refuses its sandbox as root, as which CI runs; it loads nothing but this server's page.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that must not report a single error."""
    context = chromium.new_context(viewport={"width": 1280, "height": 720})
    page, faults = context.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    yield page
    # The browser itself logs every answer above 399 and every refused connection.
    assert [fault for fault in faults if "Failed to load resource" not in fault] == []
    context.close()


def wait_for(page, selector, text):
    page.wait_for_function(
        "([s, t]) => document.querySelector(s).textContent.includes(t)", arg=[selector, text], timeout=30_000
    )


def number(page, selector):
    return float(page.text_content(selector).split()[0].replace(",", "").rstrip("%"))


def test_the_page_shows_what_the_stats_say(server, page):
    page.goto(f"{server.url}/s3r/")
    wait_for(page, "#status", "ready")
    prompts = [{**prompt(n), "max_new_tokens": 40 if n else 150} for n in range(8)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(groups, server, prompts=prompts, group_size=4)
        for selector in ("#groups", "#speed"):
            page.wait_for_function(
                "selector => parseFloat(document.querySelector(selector).textContent) > 0",
                arg=selector,
                timeout=30_000,
            )
        assert number(page, "#kv") > 0
        assert len(asked.result()) == 8
    wait_for(page, "#groups", "0")
    now = stats(server)
    wait_for(page, "#delivered", f"{now['totals']['groups']:,}")
    engine = now["acceptance"][0]
    assert number(page, "#tau-total") == pytest.approx(engine["accept_length"], abs=0.006)
    bars = page.locator(".bar > span:first-child").all_text_contents()
    shares = [float(bar.rstrip("%")) / 100 for bar in bars]
    assert shares == pytest.approx(engine["acceptance_by_position"], abs=0.0006)
    assert page.text_content("#version") == now["weight_version"]
    assert page.locator("#chart-speed .curve").get_attribute("d").count("L") >= 2
    assert "draft_length 6" in page.text_content("#configuration")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_can_be_read(server, page, width, scheme):
    page.set_viewport_size(dict(zip(("width", "height"), WIDTHS[width], strict=True)))
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{server.url}/s3r/")
    wait_for(page, "#status", "ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]
    # Contrast of text on cards as WCAG 2 defines it; 4.5 is its level AA.
    contrast = """() => {
        const light = element => property => {
            const channels = getComputedStyle(element)[property].match(/[0-9.]+/g).slice(0, 3).map(c => c / 255);
            const [r, g, b] = channels.map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const card = light(document.querySelector('.card'))('backgroundColor');
        return ['.note', '.value', 'h2', '#status'].map(selector => {
            const element = document.querySelector(selector);
            const paper = selector === '#status' ? light(element)('backgroundColor') : card;
            const [dark, bright] = [paper, light(element)('color')].sort((a, b) => a - b);
            return (bright + 0.05) / (dark + 0.05);
        });
    }"""
    assert min(page.evaluate(contrast)) >= 4.5


def test_the_page_says_that_the_engine_is_asleep_and_when_weights_change(server, model, page):
    page.goto(f"{server.url}/s3r/")
    httpx.post(f"{server.url}/release_memory_occupation", json={"tags": ["kv_cache"]}, timeout=60)
    wait_for(page, "#status", "asleep")
    assert "kv_cache released" in page.text_content("#reason")
    httpx.post(f"{server.url}/resume_memory_occupation", json={}, timeout=60)
    wait_for(page, "#status", "ready")
    assert page.locator("#notice").is_hidden()
    session = httpx.post(f"{server.url}/s3r/weights/begin", timeout=60).json()["session"]
    wait_for(page, "#status", "updating")
    name = "<img src=x onerror=document.title='run'>"
    commit = {"session": session, "weight_version": name}
    httpx.post(f"{server.url}/s3r/weights/commit", json=commit, timeout=60).raise_for_status()
    wait_for(page, "#version", name)
    assert page.title() == "S3R rollout service"
    WeightSender(server.url).send_path(model[0], "first")


def test_the_page_asks_for_the_key_and_notices_a_server_that_does_not_answer(locked, page):
    assert httpx.get(f"{locked.url}/s3r/stats", timeout=60).status_code == 401
    page.goto(f"{locked.url}/s3r")
    wait_for(page, "#reason", "asks for its API key")
    page.fill("#key", "wrong")
    page.click("#login button")
    wait_for(page, "#reason", "does not take this key")
    page.fill("#key", "user-key")
    page.click("#login button")
    wait_for(page, "#status", "ready")
    assert page.text_content("#groups") == "0"
    os.killpg(locked.process.pid, signal.SIGSTOP)
    try:
        wait_for(page, "#status", "no answer")
        assert "does not answer since" in page.text_content("#reason")
    finally:
        os.killpg(locked.process.pid, signal.SIGCONT)
    wait_for(page, "#status", "ready")
