// Pipelines: iterations from traces to a canary.
import { get } from "../api.js";
import { h, link, section, table } from "../dom.js";
import { duration, short, when } from "../format.js";

const STATES = { done: "good", reused: "good", running: "run", skipped: "", waiting: "", unreadable: "error" };

export const open = async ([id]) => {
  if (!id) {
    const { pipelines } = await get("pipelines");
    if (pipelines.length === 1) { location.replace(`#/pipelines/${pipelines[0].id}`); }
    return { title: "Pipelines", element: h("div", null, h("h1", null, "Pipelines"), pipelines.length
      ? table(["pipeline", "iterations", "state", "began"], pipelines.map((one) => [link(`#/pipelines/${one.id}`, one.name), one.num_iterations,
        one.problem ? `unreadable: ${one.problem}` : one.finished ? "finished" : one.running ? `at ${one.running}` : "–", when(one.begun_at)]), { class: "card" })
      : h("p", { class: "empty" }, "No pipeline in these folders. ", h("code", null, "posttrain pipeline run"), " makes one.")) };
  }
  const found = await get(`pipelines/${id}`);
  const draw = (one) => section(`Iteration ${one.number}`, h("p", { class: "note" },
    `began ${when(one.begun_at)}, trains ${one.start} (${one.start_why})${one.incumbent ? `, compared with ${one.incumbent}` : ""}`),
  table(["stage", "state", "time", "outcome"], one.stages.map((stage) => [stage.name, h("td", null, h("span", { class: `badge ${STATES[stage.state]}` }, stage.state)),
    stage.seconds === undefined ? "" : duration(stage.seconds), stage.headline]), { class: "card" }));
  return { title: found.name, element: h("div", null, h("h1", null, `Pipeline ${found.name}`),
    found.kpi.length ? section("Results", table(["iteration", "trained", "training", "held-out", "before", "verdict", "version"], found.kpi.map((row) => [
      row.iteration, row.start, row.training_value === null ? "–" : `${row.training_metric} ${short(row.training_value)}`,
      row.score === null ? "–" : `${row.score_metric} ${short(row.score)}`, short(row.incumbent_score), row.verdict ?? "–",
      row.version === null ? "–" : `${row.version}${row.stage ? `, ${row.stage}` : ""}`]), { class: "card" })) : "",
    found.problem ? h("p", { class: "empty", role: "alert" }, `Unreadable: ${found.problem}.`) : "",
    found.iterations.map(draw)) };
};
