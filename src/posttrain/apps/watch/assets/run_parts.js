// What several pages of a run share: its header with the tabs, its state, findings.
import { h, link, button } from "./dom.js";
import { short, when, duration } from "./format.js";

const TABS = [["", "Overview"], ["/rollouts", "Rollouts"], ["/doctor", "Doctor"], ["/config", "Config"], ["/cluster", "Cluster"]];

export const stateOf = (run) => {
  const sick = run.findings?.error > 0;
  const kind = { finished: sick ? "sick" : "finished", running: sick ? "sick" : "running" }[run.status] || "ended";
  return h("span", { class: `state ${kind}`, title: run.reason || null }, h("b", null, run.status));
};

export const badges = ({ findings, health }) => {
  const shown = ["error", "warning", "note"].filter((level) => findings[level]);
  const found = shown.map((level) => h("span", { class: `badge ${level}` }, `${findings[level]} ${level}${findings[level] === 1 ? "" : "s"}`));
  if (findings.error || findings.warning) return found;
  return [h("span", { class: `badge ${health === "healthy" ? "good" : "note"}` }, health), ...found];
};

export const runHeader = (run, tab) => h("div", { class: "run-head" },
  h("div", { class: "title" }, h("h1", null, run.title), stateOf(run), badges(run)),
  h("p", { class: "facts" }, [run.name, run.kind.toUpperCase(), run.started_at ? `started ${when(run.started_at)}` : "", run.reason]
    .filter((one) => one && one !== run.title).join(" · ")),
  h("nav", { class: "tabs", "aria-label": "Pages of this run" }, TABS.map(([path, text]) =>
    h("a", { href: `#/run/${run.id}${path}`, "aria-current": text === tab ? "page" : null }, text,
      text === "Doctor" && run.findings?.error ? h("i", { class: "count error" }, run.findings.error) : null))));

export const findingCard = (finding, run) => h("article", { class: `card finding ${finding.severity}` },
  h("p", { class: "what" }, h("b", null, finding.severity), ` ${finding.rule} · `,
    run ? link(`#/run/${run}/rollouts?step=${finding.step}`, `step ${finding.step}`) : `step ${finding.step}`,
    finding.last_step > finding.step ? ` to ${finding.last_step}` : ""),
  h("p", null, finding.text.charAt(0).toUpperCase() + finding.text.slice(1).replace(/([^.])$/, "$1.")),
  finding.fixes.length ? h("p", { class: "fixes" }, "Fix: ", finding.fixes.map((fix, index) => [index ? " or " : "", h("code", null, fix), /^[\w.]+=\S+$/.test(fix) ? copy(fix) : ""])) : null,
  finding.answers.length ? h("details", null, h("summary", null, `${finding.answers.length} answer${finding.answers.length === 1 ? "" : "s"} that show it`),
    finding.answers.map((answer) => h("div", { class: "evidence" },
      h("p", { class: "note" }, `${answer.id} · ${answer.reward === null ? "unscored" : `reward ${short(answer.reward)}`} · ${answer.num_tokens ?? "?"} tokens`),
      h("pre", null, answer.text)))) : null,
  h("p", { class: "note" }, `${finding.metric}${finding.value === null ? "" : ` = ${short(finding.value)}`} · threshold: ${finding.source}`));

const copy = (text) => button("copy", async (event) => {
  const clicked = event.target;
  await navigator.clipboard.writeText(text).then(() => { clicked.textContent = "copied"; }, () => { clicked.textContent = "cannot copy"; });
}, { class: "tiny", "aria-label": `Copy ${text}` });

export const tile = (name, value, detail = "", kind = "") => h("div", { class: `card tile ${kind}` },
  h("div", { class: "name" }, name), h("div", { class: "value" }, value), h("div", { class: "detail" }, detail));

export const timeTile = (run) => tile("Time", duration(run.wall_s), run.eta_s !== null ? `about ${duration(run.eta_s)} left` : "");
