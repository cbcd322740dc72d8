// All runs: their state at a glance.
import { get, watch } from "../api.js";
import { sparkline } from "../chart.js";
import { h, link, note } from "../dom.js";
import { ago, count, short } from "../format.js";
import { badges, stateOf } from "../run_parts.js";

export const open = async () => {
  let found = await get("runs");
  const chosen = new Set(), sparks = new Map();
  const body = h("tbody");
  const search = h("input", { type: "search", placeholder: "Filter by name, kind or state", "aria-label": "Filter runs", oninput: () => draw() });
  const compare = h("a", { class: "button main", hidden: true }, "Compare");
  const seen = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
    seen.unobserve(entry.target);
    load(entry.target);
  }));

  const load = async (cell) => {
    const { run, metric } = cell.dataset;
    const data = (await get(`runs/${run}/curves`, { key: metric, points: 60 }))[metric];
    sparks.set(run, data);
    cell.replaceChildren(sparkline(data));
  };

  const choose = (id, on) => {
    if (on) chosen.add(id); else chosen.delete(id);
    compare.hidden = chosen.size < 2;
    compare.textContent = `Compare ${chosen.size} runs`;
    compare.href = `#/compare?${[...chosen].map((one) => `run=${one}`).join("&")}`;
  };

  const row = (run) => {
    const spark = h("span", { class: "spark", "data-run": run.id, "data-metric": run.headline.metric });
    if (sparks.has(run.id)) spark.append(sparkline(sparks.get(run.id)));
    if (run.headline.value !== null) seen.observe(spark);
    const share = run.max_steps ? Math.min(1, run.step / run.max_steps) : 0;
    return h("tr", null,
      h("td", { class: "pick" }, h("input", { type: "checkbox", "aria-label": `Choose ${run.name} to compare`, checked: chosen.has(run.id), onchange: (event) => choose(run.id, event.target.checked) })),
      h("td", { class: "who" }, link(`#/run/${run.id}`, run.name), run.title === run.name ? null : h("div", { class: "note" }, run.title)),
      h("td", null, run.kind.toUpperCase()),
      h("td", null, stateOf(run), run.status === "unreadable" ? h("div", { class: "note" }, run.reason) : null),
      h("td", { class: "steps" }, h("span", null, `${count(run.step)}${run.max_steps ? ` / ${count(run.max_steps)}` : ""}`),
        h("span", { class: "progress" }, h("i", { style: { width: `${100 * share}%` } }))),
      h("td", { class: "figure" }, spark, h("span", null, h("b", null, short(run.headline.value ?? null)), h("small", null, run.headline.name))),
      h("td", { class: "health" }, badges(run)),
      h("td", { class: "n" }, run.updated_at ? ago(found.now - run.updated_at) : "–"));
  };

  const draw = () => {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = found.runs.filter((run) => wanted.every((word) => `${run.name} ${run.title} ${run.kind} ${run.status}`.toLowerCase().includes(word)));
    runs.sort((a, b) => (b.status === "running") - (a.status === "running") || (b.updated_at || 0) - (a.updated_at || 0));
    body.replaceChildren(...runs.map(row));
    none.hidden = runs.length > 0;
  };

  const none = h("div", { class: "empty", hidden: true }, h("p", null, "No run here yet."),
    note("A run appears when its folder does. Start one with "), h("code", null, "posttrain demo"));
  draw();
  let waiting = false;
  const stop = watch(null, async (ids) => {
    if (waiting) return;
    waiting = true;
    found = await get("runs").finally(() => { waiting = false; });
    ids.forEach((id) => sparks.delete(id));
    draw();
  });
  return {
    title: "Runs", stop: () => { stop(); seen.disconnect(); },
    element: h("div", null,
      h("div", { class: "bar" }, h("h1", null, "Runs"), search, compare),
      h("table", { class: "card runs" }, h("thead", null, h("tr", null,
        ["", "Run", "Kind", "State", "Steps", "Result", "Doctor", "Changed"].map((one) => h("th", { scope: "col" }, one)))), body), none),
  };
};
