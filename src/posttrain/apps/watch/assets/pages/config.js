// The settings of a run, as text, and where they differ from those of another run.
import { get } from "../api.js";
import { setQuery } from "../address.js";
import { h, note, section, select, table } from "../dom.js";
import { plural } from "../format.js";
import { runHeader } from "../run_parts.js";

export const differenceTable = (found, names) => {
  if (!found.differences.length) return h("p", { class: "empty" }, `All ${found.num_equal} settings are the same.`);
  return [table(["setting", ...names], found.differences.map((row) => [h("td", null, h("code", null, row.key)),
    ...row.values.map((value) => (value === null ? h("td", { class: "missing" }, "not set") : h("td", null, h("code", null, value))))]), { class: "card differences steady" }),
  note(`${plural(found.num_equal, "other setting")} ${found.num_equal === 1 ? "is" : "are"} the same.`)];
};

export const open = async ([id], query) => {
  const [run, { configs }, { runs }] = await Promise.all([get(`runs/${id}`), get(`runs/${id}/config`), get("runs")]);
  const others = runs.filter((one) => one.id !== id);
  const compared = h("div");
  const text = h("pre", { class: "card config" });
  const search = h("input", { type: "search", placeholder: "Filter lines", "aria-label": "Filter lines", oninput: () => drawText() });
  let shown = configs.length - 1;
  const drawText = () => {
    const wanted = search.value.toLowerCase();
    const lines = (configs[shown]?.text ?? "").split("\n").filter((line) => line.toLowerCase().includes(wanted));
    text.replaceChildren(lines.join("\n") || "nothing");
  };
  const drawDifferences = async (params) => {
    const other = params.get("with");
    if (!other) { compared.replaceChildren(); return; }
    const found = await get("config-differences", { run: [id, other] });
    compared.replaceChildren(...[differenceTable(found, [run.name, runs.find((one) => one.id === other)?.name ?? other])].flat());
  };
  drawText();
  await drawDifferences(query);
  return {
    title: `Config · ${run.title}`, update: drawDifferences,
    element: h("div", null, runHeader(run, "Config"),
      section("Differences", others.length ? select([["", "choose another run"], ...others.map((one) => [one.id, one.name])], query.get("with") || "",
        (value) => setQuery({ with: value }), { "aria-label": "Run to compare with" }) : note("There is no other run."), compared),
      h("section", null, h("div", { class: "bar" }, h("h2", null, "All settings"),
        configs.length > 1 ? select(configs.map((one, index) => [String(index), `from step ${one.from_step}`]), String(shown),
          (value) => { shown = Number(value); drawText(); }, { "aria-label": "Which config" }) : "", search), text)),
  };
};
