// Two answers, word by word.
import { setQuery } from "../address.js";
import { get } from "../api.js";
import { textOf } from "../answers.js";
import { wordDiff } from "../diff.js";
import { h, link, note, select } from "../dom.js";
import { short } from "../format.js";

const load = async (text) => {
  const [run, kind, step, index, sample] = (text ?? "").split(":");
  const [{ group }, { name }] = await Promise.all([get(`runs/${run}/rollouts/${kind}/${step}/${index}`), get(`runs/${run}`)]);
  const answer = group.completions[Number(sample)] ?? group.completions[0];
  return { run, kind, step, index, sample: Number(sample), group, answer, name };
};

const side = (which, one) => h("div", { class: `side ${which}` },
  h("p", null, h("b", null, which.toUpperCase()), " ", link(`#/run/${one.run}/rollouts?kind=${one.kind}&step=${one.step}&group=${one.index}`, `${one.name}, step ${one.step}`), ` · ${one.group.id}`),
  h("p", { class: "note" }, `reward ${short(one.answer.reward)} · ${one.answer.num_tokens} tokens · ${one.answer.finish_reason === "length" ? "cut off" : "stopped"} `,
    select(one.group.completions.map((answer, index) => [String(index), `answer ${index + 1}, reward ${short(answer.reward)}`]), String(one.sample),
      (value) => setQuery({ [which]: [one.run, one.kind, one.step, one.index, value].join(":") }), { "aria-label": `Answer of ${which.toUpperCase()}` })));

export const open = async (_, query) => {
  const element = h("div");
  const draw = async (params) => {
    const [a, b] = await Promise.all([load(params.get("a")), load(params.get("b"))]);
    const parts = wordDiff(textOf(a.answer), textOf(b.answer));
    const same = parts.filter(([kind]) => kind === "same").reduce((sum, [, text]) => sum + text.length, 0);
    const most = Math.max(textOf(a.answer).length, textOf(b.answer).length, 1);
    const column = (kind) => h("pre", { class: `card diff ${kind}` }, parts.filter(([own]) => own === "same" || own === kind)
      .map(([own, text]) => (own === "same" ? text : h(kind === "only-a" ? "del" : "ins", null, text))));
    element.replaceChildren(h("div", { class: "bar" }, h("h1", null, "Two answers"), h("span", { class: "hint" }, `${Math.round((100 * same) / most)} % of the text is the same`)),
      a.group.prompt === b.group.prompt ? h("details", { class: "card prompt", open: true }, h("summary", null, "The prompt of both"), h("pre", null, a.group.prompt)) : note("The prompts differ."),
      h("div", { class: "sides" }, side("a", a), side("b", b), column("only-a"), column("only-b")));
  };
  await draw(query);
  return { title: "Two answers", element, update: draw };
};
