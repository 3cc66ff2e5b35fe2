"""Looks at the pages of tests/test_report.sh in a browser, as a reader would: report_in_browser.py ONE SEVERAL FEW NOTHING LONG. Prints what is wrong;
exit status 1 then."""
import math, os, sys, time
from browser import Browser

browser, problems = Browser(), []


def check(good, text):
    if not good:
        problems.append(text)


def near(found, expected, what, tolerance=0.75):
    check(found is not None and abs(found - expected) <= tolerance, f"{what}: {found}, expected {expected}")


def run(script):
    return browser.run(script)


def center(selector):
    """The middle of an element on the screen."""
    return run(f"(e => {{ if (!e) return null; const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; }})"
               f"(document.querySelector({selector!r}))")


def scale(panel, attribute):
    """From a value of an axis to a place on the screen, by two of the axis' labels and the lines of the grid beside them."""
    side = "x" if attribute == "data-tick" else "y"
    ticks = run(f"""[...document.querySelectorAll('#panel-{panel} [{attribute}]')].map(t => {{
        const r = t.previousElementSibling.getBoundingClientRect();
        return [+t.getAttribute('{attribute}'), r.{side} + r.{'width' if side == 'x' else 'height'} / 2]; }})""")
    (v0, p0), (v1, p1) = ticks[0], ticks[-1]
    log = side == "y" and run(f"document.querySelector('#panel-{panel} svg.chart').dataset.log") == "true"
    on = math.log if log else float
    return lambda v: p0 + (on(v) - on(v0)) / (on(v1) - on(v0)) * (p1 - p0)


def line(panel, series, name):
    """The points of a line on the screen."""
    return run(f"""(p => {{
        const m = p.getScreenCTM();
        return p.getAttribute('d').match(/[-0-9.]+ [-0-9.]+/g).map(t => t.split(' ').map(Number)).map(([x, y]) => [x * m.a + m.e, y * m.d + m.f]); }})
        ([...document.querySelectorAll('#panel-{panel} path[data-series="{series}"]')].find(p => p.dataset.run === {name!r} && p.matches('.line')))""")


def show(panel):
    run(f"document.querySelector('#panel-{panel}').scrollIntoView({{block: 'center'}})")
    browser.settle()


def tip():
    return run("document.getElementById('tip').style.visibility === 'visible' ? document.getElementById('tip').innerText : ''")


def press(selector):
    run(f"document.querySelector({selector!r}).click()")
    browser.settle()


def one_run(path):
    browser.size(1200, 900)
    browser.open(path)
    check(run("document.title") == "full - ling report", "the title is " + run("document.title"))
    panels = run("[...document.querySelectorAll('svg.chart')].map(c => c.dataset.panel)")
    check(panels == ["loss", "lr", "batch", "grad_norm", "update_norm", "balance_loss", "z_loss", "tokens_per_second", "peak_share", "load", "experts"],
          f"panels {panels}")
    check(run("[...document.querySelectorAll('figure')].every(f => f.querySelector('h2').innerText && f.querySelector('figcaption').innerText)"),
          "a chart without a title or a text")
    check(run("document.querySelectorAll('img, b, iframe').length") == 0, "a text became HTML")

    # marks, points and lines are where the axes say
    show("loss")
    x, y = scale("loss", "data-tick"), scale("loss", "data-ytick")
    marks = run("[...document.querySelectorAll('#panel-loss .mark[data-kind]')].map(m => [m.dataset.kind, +m.dataset.step])")
    check(marks == [["skip", 10], ["skip", 20], ["slow_rank", 45], ["rollback", 50]], f"marks {marks}")
    for kind, step in marks:
        near(center(f'#panel-loss .mark[data-kind="{kind}"][data-step="{step}"]')[0], x(step), f"mark {kind} of step {step}", 1.6)
    run("document.querySelector('#panel-loss').scrollIntoView({block: 'center'})")
    for step, value in ((0, 3.5), (20, 2.8), (40, 2.6), (60, 2.4)):
        place = center(f'#panel-loss .point[data-series="validation"][data-step="{step}"]')
        near(place[0], x(step), f"x of the validation of step {step}")
        near(place[1], y(value), f"y of the validation of step {step}")
    near(center('#panel-loss [data-bad="loss"]')[0], x(31), "mark of the loss that is not finite")
    show("grad_norm")
    near(center('#panel-grad_norm [data-limit="0.75"]')[1], scale("grad_norm", "data-ytick")(0.75), "the line of the clip")
    show("lr")
    x, y = scale("lr", "data-tick"), scale("lr", "data-ytick")
    points = line("lr", "lr", "full")
    for step in (1, 30, 60):
        found = min(points, key=lambda p: abs(p[0] - x(step)))
        near(found[1], y(1e-4 * step), f"learning rate of step {step}")
    check(len(line("loss", "loss", "full")) >= 59, "the line of the loss lacks steps")
    check(run("document.querySelector('#panel-loss path[data-series=loss]').getAttribute('d').split('M').length") == 3, "no gap at step 31")

    # the pointer reads values, in all charts together
    show("loss")
    x = scale("loss", "data-tick")
    browser.move(x(40.3), center("#panel-loss svg.chart .area")[1])
    text = tip()
    check("40" in text.split() and "0.04" in text.split() and "2.6 (step 40)" in text, f"at step 40 the page says {text!r}")
    check(run("[...document.querySelectorAll('.cross')].every(c => c.getAttribute('visibility') === 'visible')"), "no reading line in all charts")
    browser.move(x(31), center("#panel-loss svg.chart .area")[1])
    check("not finite" in tip(), f"at step 31 the page says {tip()!r}")
    browser.move(x(45), center("#panel-loss svg.chart .area")[1])
    check("step 45: slow rank; rank 2, host </script>" in tip(), f"at the mark of step 45 the page says {tip()!r}")
    show("load")
    area = center("#panel-load .area")
    browser.move(scale("load", "data-tick")(30), area[1] + 20)
    check("step 30, layer 1" in tip() and "1.5 times" in tip(), f"the load of layers says {tip()!r}")
    show("experts")
    box = run("(r => [r.top, r.height])(document.querySelector('#panel-experts .area').getBoundingClientRect())")
    browser.move(scale("experts", "data-tick")(10), box[0] + box[1] * 0.5)
    check("expert 1" in tip() and "1.5 times" in tip(), f"the load of experts says {tip()!r}")
    check(run("document.querySelectorAll('image.heat').length") == 2, "no heat maps")

    # a drag zooms all charts, a double click resets, keys do both
    show("loss")
    x, middle = scale("loss", "data-tick"), center("#panel-loss .area")[1]
    browser.drag(x(20), x(40), middle)
    zoom = run("[...document.querySelectorAll('svg.chart')].map(c => [+c.dataset.x0, +c.dataset.x1])")
    check(all(abs(a - 20) < 0.1 and abs(b - 40) < 0.1 for a, b in zoom), f"after a drag from 20 to 40: {zoom}")
    x = scale("loss", "data-tick")
    near(center('#panel-loss [data-bad="loss"]')[0], x(31), "zoomed, the mark of the loss that is not finite")
    check(run("document.querySelectorAll('#panel-loss .mark[data-kind]').length") == 1, "zoomed, marks that lie outside")
    browser.double_click(x(30), middle)
    check(run("document.querySelector('svg.chart').dataset.x1") == "60", "a double click does not reset")
    run("document.querySelector('#panel-loss svg.chart').focus()")
    browser.key("ArrowRight")
    check("41\t0.041\t" in tip(), f"an arrow key, at step 40, reads {tip()!r}")
    browser.key("+")
    near(run("+document.querySelector('svg.chart').dataset.x1 - +document.querySelector('svg.chart').dataset.x0"), 30, "the range after +", 0.01)
    before = run("+document.querySelector('svg.chart').dataset.x0")
    browser.key("ArrowRight", shift=True)
    near(run("+document.querySelector('svg.chart').dataset.x0") - before, 3, "the move by Shift and an arrow", 0.01)
    browser.key("0")
    check(run("document.querySelector('svg.chart').dataset.x1") == "60", "the key 0 does not reset")

    # the other axes, and scales
    run("(a => { a.value = 'tokens'; a.dispatchEvent(new Event('change')); })(document.getElementById('axis'))")
    browser.settle()
    near(center('#panel-loss .mark[data-step="45"]')[0], scale("loss", "data-tick")(45 * 512), "by tokens, the mark of step 45", 1.6)
    run("(a => { a.value = 'seconds'; a.dispatchEvent(new Event('change')); })(document.getElementById('axis'))")
    browser.settle()
    near(center('#panel-loss .mark[data-step="45"]')[0], scale("loss", "data-tick")(22.5), "by time, the mark of step 45", 1.6)
    check(run("document.querySelector('#panel-loss svg.chart').dataset.log") == "true", "a loss from 0.001 to 4 is not on a logarithmic axis")
    press("#panel-loss .scale")
    check(run("document.querySelector('#panel-loss svg.chart').dataset.log") == "false", "the button for the scale does nothing")
    run("(s => { s.value = 0; s.dispatchEvent(new Event('input')); })(document.getElementById('smoothing'))")
    browser.settle()
    check(run("document.querySelectorAll('.line.bold').length") == 0, "lines are smoothed where the slider is at 0")
    run("(s => { s.value = 50; s.dispatchEvent(new Event('input')); })(document.getElementById('smoothing'))")
    browser.settle()
    check("mean of 3 steps" in run("document.getElementById('bar').innerText"), "60 steps are not smoothed over 3")
    browser.move(scale("loss", "data-tick")(22.5), center("#panel-loss .area")[1])
    check("0.045\t0.045" in tip(), f"smoothed at step 45: {tip()!r}")
    press("#incidents button")
    check(run("document.querySelectorAll('#incidents tbody tr').length") == 4, "incidents are missing in the list")
    check(run("document.querySelector('svg.chart').dataset.x1 < 29"), "an incident's button shows no part")
    check("owned" in run("document.getElementById('samples').innerText"), "a sample is not shown as it is")

    # media
    browser.media(dark=True)
    check(run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c < 60)"), "dark: the page is not dark")
    check(run("getComputedStyle(document.body).color.match(/\\d+/g).every(c => c > 200)"), "dark: the text is not light")
    browser.media(media="print", dark=True)
    check(run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c > 200)"), "printed, the page is dark")
    check(run("[...document.querySelectorAll('.control')].every(c => getComputedStyle(c).display === 'none')"), "printed, there are controls")
    browser.media()
    browser.size(380, 800)
    check(run("document.documentElement.scrollWidth") <= 380, "a narrow page is wider than the screen")


def several_runs(path):
    browser.size(1200, 900)
    browser.open(path)
    names = run("[...new Set([...document.querySelectorAll('#panel-loss .line')].map(l => l.dataset.run))]")
    check(len(names) == 3, f"lines of {names}")
    colours = run("""[...new Set([...document.querySelectorAll('#panel-loss .line[data-series="loss"]')].map(l => getComputedStyle(l).stroke))]""")
    check(len(colours) == 3, f"colours {colours}")
    show("loss")
    browser.move(scale("loss", "data-tick")(23), center("#panel-loss .area")[1])
    rows = tip().split("\n")
    check(len(rows) == 4 and "0.023" in rows[1] and "0.03" in rows[2], f"the values of three runs: {rows}")
    press("#runs button:nth-child(2)")
    check(run("""document.querySelectorAll('.line[data-run="second"]').length""") == 0, "a run that is switched off is shown")
    press("#runs button:nth-child(2)")
    check(run("""document.querySelectorAll('.line[data-run="second"]').length""") > 0, "a run that is switched on again is not shown")
    check(run("document.querySelectorAll('#config tbody tr').length") > 0, "no table of the configs")
    check(run("document.title") == "3 runs - ling report", "the title is " + run("document.title"))


def few_steps(path):
    """A run without a step, and runs whose lines are hard to draw: of one step, and with values of all sizes."""
    browser.size(1200, 900)
    browser.open(path)
    check(run("document.querySelectorAll('#summary tbody tr').length") == 3, "not three runs")
    check(run("document.querySelectorAll('#panel-loss .point[data-run=single]').length") == 1, "a single step is no point")
    for panel in ("loss", "grad_norm"):
        press(f"#panel-{panel} .scale")
        check(run(f"[...document.querySelectorAll('#panel-{panel} path.line')].every(p => !/NaN|Infinity|undefined/.test(p.getAttribute('d')))"),
              f"{panel}: a line with no number")
        check(run(f"document.querySelectorAll('#panel-{panel} [data-ytick]').length") >= 2, f"{panel}: an axis without numbers")
    browser.drag(600, 700, center("#panel-loss .area")[1])


def nothing(path):
    browser.open(path)
    check("no steps yet" in run("document.getElementById('summary').innerText"), "a run without a step is not named")
    check(run("document.querySelectorAll('svg.chart').length") == 0, "charts of nothing")


def long_run(path):
    browser.size(1200, 900)
    seconds = browser.open(path)
    show("loss")
    x, y = scale("loss", "data-tick"), scale("loss", "data-ytick")
    top = min(line("loss", "loss", "long"), key=lambda p: p[1])
    near(top[0], x(77777), "x of the spike", 2)
    near(top[1], y(90), "y of the spike", 1)
    started = time.time()
    browser.drag(x(70000), x(80000), center("#panel-loss .area")[1])
    zoom = time.time() - started
    check(abs(run("+document.querySelector('svg.chart').dataset.x0") - 70000) < 200, "a drag does not zoom")
    check(seconds < 20 and zoom < 10, f"it takes {seconds:.1f} s to open, {zoom:.1f} s to zoom")
    print(f"long: {os.path.getsize(path) / 1e6:.1f} MB; {seconds:.2f} s to open, {zoom:.2f} s to zoom")


try:
    for look, path in zip((one_run, several_runs, few_steps, nothing, long_run), sys.argv[1:]):
        look(path)
        problems += [f"{path}: {c}" for c in browser.complaints()]
finally:
    browser.close()
print("\n".join(problems))
sys.exit(bool(problems))
