// What is wrong with a run, and the setting that fixes it.
import { get, watch } from "../api.js";
import { button, h, note, section, table } from "../dom.js";
import { findingCard, runHeader } from "../run_parts.js";

export const open = async ([id]) => {
  const head = h("div"), list = h("div"), said = h("span", { class: "hint", role: "status" });
  const draw = async (again = false) => {
    const [run, found] = await Promise.all([get(`runs/${id}`), get(`runs/${id}/doctor`, { again: again || null })]);
    head.replaceChildren(runHeader(run, "Doctor"));
    list.replaceChildren(...(found.findings.length ? found.findings.map((one) => findingCard(one, id))
      : [h("p", { class: "empty" }, run.step ? `No finding: ${run.health}.` : "There is no step to look at yet.")]),
    found.unscored.length ? section("Answers that could not be scored", table(["step", "of", "reason", "answers"],
      found.unscored.map((one) => [one.step, one.stage, one.reason, one.count]))) : "");
    return run;
  };
  const run = await draw();
  const examine = button("Examine the whole run again", async (event) => {
    event.target.disabled = true;
    said.textContent = "looking at every step …";
    await draw(true).finally(() => { event.target.disabled = false; said.textContent = "examined just now, with today's rules"; });
  });
  return {
    title: `Doctor · ${run.title}`, stop: watch(id, () => draw()),
    element: h("div", null, head, h("div", { class: "bar" }, h("h2", null, "Findings"), examine, said), list,
      note("A run examines itself after every step. `posttrain doctor --rules` prints the rules, what they mean and what to do.")),
  };
};
