// One run: how it is, its curves, what went wrong.
import { setQuery } from "../address.js";
import { get, watch } from "../api.js";
import { Chart, chartGroup } from "../chart.js";
import { h, link, section, select, table } from "../dom.js";
import { count, duration, short } from "../format.js";
import { findingCard, runHeader, tile, timeTile } from "../run_parts.js";

const RANGES = [["", "all steps"], ["100", "last 100 steps"], ["1000", "last 1,000 steps"]];
const SHOWN_FINDINGS = 3;

export const open = async ([id], query) => {
  let run = await get(`runs/${id}`);
  const group = chartGroup({
    onstep: (step) => { if (run.rollouts.train.count) location.hash = `#/run/${id}/rollouts?step=${step}`; },
    onrange: (first, last) => setQuery({ first, last }),
  });
  const head = h("div"), strip = h("div", { class: "strip", role: "list" }), tiles = h("div", { class: "tiles" }), recent = h("p", { class: "note recent" }), found = h("div"), after = h("div");
  const grid = h("div", { class: "charts" }), others = h("div", { class: "charts" });
  const shown = new Map();

  const range = () => {
    if (query.get("last_n")) return { first: Math.max(0, run.step - Number(query.get("last_n"))) };
    return { first: query.get("first"), last: query.get("last") };
  };
  const marks = (keys) => [
    ...run.marks.saves.map((step) => ({ step, kind: "save", text: "checkpoint" })),
    ...run.marks.resumes.map((step) => ({ step, kind: "resume", text: "resumed after this step" })),
    ...run.all_findings.filter((one) => keys.includes(one.metric)).map((one) => ({ step: one.step, kind: one.severity, text: `${one.rule}: ${one.text}` })),
  ];
  const isSmooth = (key) => !key.startsWith("validation") && key !== "train/lr";

  const drawCurves = async (specs, into) => {
    const keys = specs.flatMap((spec) => spec.curves.map(([key]) => key));
    const data = {};
    for (let start = 0; start < keys.length; start += 24) {
      Object.assign(data, await get(`runs/${id}/curves`, { key: keys.slice(start, start + 24), points: 300, ...range() }));
    }
    specs.forEach((spec, index) => {
      if (!shown.has(spec.title)) {
        const chart = new Chart(group, { title: spec.title, note: spec.note, wide: into === grid && index === 0, id: `chart-${spec.title.replaceAll(/\W+/g, "-")}` });
        shown.set(spec.title, chart);
        into.append(chart.element);
      }
      shown.get(spec.title).update(spec.curves.map(([key, name], colour) => ({ name, colour: colour % 8, data: data[key], smooth: isSmooth(key) })),
        marks(spec.curves.map(([key]) => key)), spec.bands);
    });
  };
  const otherSpecs = () => run.other_keys.map((key) => ({ title: key, curves: [[key, "value"]], note: "", bands: [] }));

  const drawFacts = () => {
    head.replaceChildren(runHeader(run, "Overview"));
    strip.replaceChildren(...run.vitals.map((one) => h("button", { type: "button", class: `vital ${one.level}`, role: "listitem",
      onclick: () => document.getElementById(`chart-${one.title.replaceAll(/\W+/g, "-")}`)?.scrollIntoView({ block: "center", behavior: "smooth" }) },
    h("span", { class: "name" }, one.title), h("b", null, short(one.value)), h("span", { class: "word" }, { good: "in range", unusual: "unusual, no finding" }[one.level] ?? one.level))));
    recent.textContent = run.vitals.length && run.step > 1 ? `Above: medians of the last ${Math.min(run.num_recent, run.step)} steps.` : "";
    const { best, validation, headline } = run, sampled = run.rollouts.train.count;
    const share = run.max_steps ? Math.min(1, run.step / run.max_steps) : 0;
    const sick = run.findings.error > 0;
    const better = validation && validation.last !== validation.first.value && (validation.last < validation.first.value) === validation.metric.endsWith("loss");
    tiles.replaceChildren(
      best ? tile(headline.name, short(best.last), `first ${short(best.first.value)} · best ${short(best.value)} at step ${best.step}`) : "",
      validation ? tile(`Validation ${run.validation_name ?? validation.metric.replace("validation/", "")}`,
        validation.first.step === run.step ? short(validation.last, 3) : `${short(validation.first.value, 3)} → ${short(validation.last, 3)}`,
        `since ${validation.first.step ? `step ${validation.first.step}` : "before training"} · best ${short(validation.value)} at step ${validation.step}`, better && !sick ? "good" : "") : "",
      tile("Steps", h("span", null, count(run.step), run.max_steps ? h("small", null, ` / ${count(run.max_steps)}`) : null),
        run.max_steps ? h("span", { class: "progress" }, h("i", { style: { width: `${100 * share}%` } })) : ""),
      timeTile(run),
      sampled ? tile("Answers", count(run.num_answers), link(`#/run/${id}/rollouts`, `read those of ${count(sampled)} step${sampled === 1 ? "" : "s"}`))
        : ["grpo", "ppo", "distill"].includes(run.kind) ? tile("Answers", "none yet") : tile("Answers", "–", "this kind of run samples none"));
    const worst = run.all_findings.slice(0, SHOWN_FINDINGS);
    found.replaceChildren(...worst.map((one) => findingCard(one, id)),
      run.all_findings.length > SHOWN_FINDINGS ? h("p", null, link(`#/run/${id}/doctor`, `all ${run.all_findings.length} findings`)) : "");
    after.replaceChildren(stages(run.stages),
      run.config_changes.length ? section("Settings changed within the run", table(["from step", "setting", "before", "since"],
        run.config_changes.map((one) => [one.from_step, one.key, String(one.old), String(one.new)]))) : "",
      run.warnings.length ? section("Warnings", table(["after step", "warning", "times"], run.warnings.map((one) => [one.step, one.text, one.count]))) : "");
  };

  const more = h("details", { class: "more", ontoggle: () => { if (more.open && !others.childElementCount) drawCurves(otherSpecs(), others); } },
    h("summary", null, `All other metrics (${run.other_keys.length})`), others);
  const redraw = async () => {
    await drawCurves(run.charts, grid);
    if (more.open) await drawCurves(otherSpecs(), others);
  };
  drawFacts();
  await redraw();

  let waiting = false, again = false;
  const refresh = async () => {
    if (waiting) { again = true; return; }
    waiting = true;
    try {
      run = await get(`runs/${id}`);
      drawFacts();
      await redraw();
    } finally {
      waiting = false;
      if (again) { again = false; refresh(); }
    }
  };
  const chooseRange = select(RANGES, query.get("last_n") || "", (value) => setQuery({ last_n: value, first: null, last: null }), { "aria-label": "Steps to show" });
  const whole = h("button", { type: "button", class: "quiet", hidden: !query.get("first"), onclick: () => setQuery({ first: null, last: null }) }, "whole run");
  const smooth = h("input", { type: "checkbox", checked: true, onchange: (event) => { group.smooth = event.target.checked; group.redraw(); } });
  return {
    title: run.title, stop: watch(id, refresh),
    update: (params) => {
      query = params;
      chooseRange.value = params.get("last_n") || "";
      whole.hidden = !params.get("first");
      redraw();
    },
    element: h("div", null, head, strip, recent, tiles, found,
      h("section", null, h("div", { class: "bar" }, h("h2", null, "Curves"), chooseRange, whole, h("label", { class: "toggle" }, smooth, " smooth"),
        h("span", { class: "hint" }, "Click a step to read its rollouts; drag to zoom.")), grid),
      after, more),
  };
};

const stages = (found) => {
  const whole = found.reduce((sum, one) => sum + one.seconds, 0);
  if (!whole) return "";
  const named = found.slice(0, 7);
  return section("Time of a step", h("div", { class: "card stages" },
    h("div", { class: "stacked" }, named.map((one, index) => h("i", { class: `s${index}`, title: `${one.name}: ${duration(one.seconds)}`, style: { "flex-grow": one.seconds / whole } }))),
    h("div", { class: "legend" }, named.map((one, index) => h("span", { class: `key s${index}` }, h("i"), `${one.name.replaceAll("_", " ")} `, h("b", null, duration(one.seconds)))))));
};
