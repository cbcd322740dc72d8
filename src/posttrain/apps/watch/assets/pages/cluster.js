// The processes of a run: workers of each group with their machine, what they do and their memory, and every start of the run.
import { get, watch } from "../api.js";
import { h, number, section, table } from "../dom.js";
import { ago, bytes, duration, when } from "../format.js";
import { runHeader } from "../run_parts.js";

export const open = async ([id]) => {
  const head = h("div"), body = h("div");
  let run, found, at = 0;
  const draw = () => {
    const now = found.now + (Date.now() - at) / 1000;
    const newest = found.attempts.at(-1);
    const age = newest && !newest.ended ? now - newest.heartbeat : null;
    const phase = found.phases.at(-1);
    const running = run.status === "running";
    body.replaceChildren(
      h("div", { class: "tiles" },
        fact("Heartbeat", age === null ? "ended" : ago(age), age !== null && age > found.stale_s ? "bad" : ""),
        fact("Phase", running && phase ? withoutNumbers(phase.phase) : "–", "", running && phase ? `step ${phase.step}, for ${duration(Math.max(0, now - phase.time))}` : ""),
        fact("Workers", found.ranks.length || "–", "", found.ranks_at ? `seen ${ago(now - found.ranks_at)}` : "")),
      found.ranks.length ? section("Workers", table(["group", "", "host", "process", "device", "now", "busy", "in use", "reserved", "of", ""],
        found.ranks.map((rank) => [rank.group ?? "policy", number(rank.rank), rank.node ? `${rank.host} (${rank.node})` : rank.host ?? "no answer", number(rank.pid ?? "–"), rank.device ?? "–",
          rank.operation === undefined ? "–" : rank.operation || "waiting", number(rank.busy_share === undefined ? "–" : `${Math.round(100 * rank.busy_share)} %`),
          number(bytes(rank.allocated_bytes)), number(bytes(rank.reserved_bytes)), number(bytes(rank.total_bytes)),
          h("td", null, rank.total_bytes ? meter(rank.reserved_bytes / rank.total_bytes) : "")]), { class: "card steady" }))
        : h("p", { class: "empty" }, "This run has no workers.jsonl: it was made by an earlier version, or has not finished a step."),
      section("Phases", timeline(found.phases, now, running)),
      section("Starts of this run", table(["", "host", "process", "began", "ended", "exit code", "checkpoints"], [...found.attempts].reverse().map((one) => [
        number(one.number), one.holder?.host ?? "–", number(one.holder?.pid ?? "–"), when(one.holder?.since), one.ended ? when(one.ended) : "–",
        number(one.exit_code ?? "–"), one.last_checkpoint ? `step ${one.first_checkpoint} to ${one.last_checkpoint}` : "–"]), { class: "card steady" })));
  };
  const load = async () => {
    [run, found] = await Promise.all([get(`runs/${id}`), get(`runs/${id}/cluster`)]);
    at = Date.now();
    head.replaceChildren(runHeader(run, "Cluster"));
    draw();
  };
  await load();
  const end = watch(id, load);
  const clock = setInterval(load, 5000); // heartbeats change no file that is watched
  return { title: `Cluster · ${run.title}`, stop: () => { end(); clearInterval(clock); }, element: h("div", null, head, body) };
};

const fact = (name, value, kind = "", detail = "") => h("div", { class: `card tile ${kind}` },
  h("div", { class: "name" }, name), h("div", { class: "value" }, value), h("div", { class: "detail" }, detail));
const meter = (share) => h("span", { class: "progress" }, h("i", { class: share > 0.95 ? "full" : "", style: { width: `${Math.min(100, 100 * share)}%` } }));

const withoutNumbers = (phase) => phase.replace(/( at step| for batch of size)? \d+$/, "");

// The latest phases one after another, as wide as they took.
const timeline = (phases, now, running) => {
  if (phases.length < 2) return h("p", { class: "empty" }, "Nothing yet.");
  const last = phases.slice(-40);
  const spans = last.map((one, index) => ({ ...one, phase: withoutNumbers(one.phase), seconds: (last[index + 1]?.time ?? (running ? now : one.time)) - one.time }));
  const names = [...new Set(spans.map((one) => one.phase))];
  return h("div", { class: "card stages" },
    h("div", { class: "stacked" }, spans.map((one) => h("i", { class: `s${names.indexOf(one.phase) % 8}`, title: `step ${one.step}, ${one.phase}: ${duration(one.seconds)}`, style: { "flex-grow": Math.max(one.seconds, 0.001) } }))),
    h("div", { class: "legend" }, names.map((name, index) => h("span", { class: `key s${index % 8}` }, h("i"), name))));
};
