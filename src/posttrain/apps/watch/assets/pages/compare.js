// Several runs in the same charts, their figures side by side, and the settings in which they differ.
import { get, watch } from "../api.js";
import { Chart, chartGroup } from "../chart.js";
import { h, link, number, section, select, table } from "../dom.js";
import { count, short } from "../format.js";
import { badges, stateOf } from "../run_parts.js";
import { differenceTable } from "./config.js";

const MAX_RUNS = 8;

export const open = async (_, query) => {
  const { runs } = await get("runs");
  const chosen = query.getAll("run").filter((id) => runs.some((run) => run.id === id)).slice(0, MAX_RUNS);
  const go = (ids) => { location.hash = `#/compare${ids.length ? "?" : ""}${ids.map((id) => `run=${id}`).join("&")}`; };
  const left = runs.filter((run) => !chosen.includes(run.id));
  const chooser = h("div", { class: "bar" }, h("h1", null, "Compare"), left.length && chosen.length < MAX_RUNS
    ? select([["", "add a run"], ...left.map((run) => [run.id, run.name])], "", (id) => id && go([...chosen, id]), { "aria-label": "Add a run" }) : null);
  const body = h("div");
  const page = { title: "Compare", element: h("div", null, chooser, body) };
  page.update = async (params) => { // other runs: all of it anew
    page.stop?.();
    const next = await open(_, params);
    page.element.replaceChildren(...next.element.childNodes);
    page.stop = next.stop;
  };
  if (!chosen.length) {
    body.append(h("p", { class: "empty" }, "Choose runs above, or mark them in the ", link("#/", "list of runs"), "."));
    return page;
  }
  const group = chartGroup();
  const figures = h("div"), grid = h("div", { class: "charts" }), settings = h("div");
  const charts = new Map();

  const draw = async () => {
    const pages = await Promise.all(chosen.map((id) => get(`runs/${id}`)));
    figures.replaceChildren(table(["", "run", "state", "steps", "result", "best", "validation", "doctor", ""], pages.map((run, index) => [
      h("td", null, h("i", { class: `swatch s${index}` })), h("td", null, link(`#/run/${run.id}`, run.name)), h("td", null, stateOf(run)), number(count(run.step)),
      number(run.best ? short(run.best.last) : "–"), number(run.best ? short(run.best.value) : "–"), number(run.validation ? short(run.validation.last) : "–"),
      h("td", null, badges(run)),
      h("td", null, h("button", { type: "button", class: "tiny", "aria-label": `Leave out ${run.name}`, onclick: () => go(chosen.filter((id) => id !== run.id)) }, "×")),
    ]), { class: "card steady" }));
    const titles = new Map();
    for (const run of pages) for (const spec of run.charts) {
      for (const [key, name] of spec.curves) {
        const title = spec.curves.length > 1 ? `${spec.title}: ${name}` : spec.title;
        if (!titles.has(title)) titles.set(title, { key, spec });
      }
    }
    const keys = [...new Set([...titles.values()].map((one) => one.key))];
    const data = await Promise.all(chosen.map((id) => get(`runs/${id}/curves`, { key: keys.slice(0, 60), points: 200 })));
    for (const [title, { key, spec }] of titles) {
      const curves = chosen.map((id, index) => ({ name: pages[index].name, colour: index, data: data[index][key] ?? { steps: [], mean: [] }, smooth: !key.startsWith("validation") && key !== "train/lr" }));
      const filled = curves.filter((curve) => curve.data.steps.length);
      if (!filled.length) continue;
      if (!charts.has(title)) {
        charts.set(title, new Chart(group, { title, note: key, wide: charts.size === 0, bands: spec.bands }));
        grid.append(charts.get(title).element);
      }
      charts.get(title).update(filled, []);
    }
    if (chosen.length > 1) {
      settings.replaceChildren(...[differenceTable(await get("config-differences", { run: chosen }), pages.map((run) => run.name))].flat());
    }
  };
  await draw();
  body.append(figures, section("Curves", grid), chosen.length > 1 ? section("Settings that differ", settings) : "");
  let waiting = false;
  page.stop = watch(null, async (ids) => {
    if (waiting || !ids.some((id) => chosen.includes(id))) return;
    waiting = true;
    await draw().finally(() => { waiting = false; });
  });
  return page;
};
