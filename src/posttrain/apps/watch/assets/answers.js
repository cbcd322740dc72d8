// A group: its prompt, what was expected, and every answer with its reward.
import { address, get } from "./api.js";
import { button, h } from "./dom.js";
import { short } from "./format.js";
import { pin } from "./pins.js";
import { tokenView } from "./tokens.js";

export const textOf = (answer) => (answer.turns ? answer.turns.map((turn) => `[${turn.role}]\n${turn.text}`).join("\n\n") : answer.text);

// From red to green over the rewards that are on the page.
export const rewardScale = (rewards) => {
  const scored = rewards.filter((one) => one !== null);
  const low = Math.min(0, ...scored), high = Math.max(low + 1e-9, ...scored);
  return (reward) => (reward === null ? "0%" : `${Math.max(0, Math.min(100, Math.round((100 * (reward - low)) / (high - low))))}%`);
};

export const rewardDots = (rewards, scale, matching = null) => h("span", { class: "dots", "aria-hidden": "true" }, rewards.map((reward, index) =>
  h("i", { class: `${reward === null ? "unscored" : ""}${matching && !matching.includes(index) ? " other" : ""}`, style: { "--tone-share": scale(reward) } })));

// Marks each place where `wanted` is found. Text stays text.
export const marked = (text, wanted) => {
  if (!wanted) return [text];
  const parts = [], lower = text.toLowerCase(), needle = wanted.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(needle); at >= 0 && parts.length < 2000; at = lower.indexOf(needle, from)) {
    parts.push(text.slice(from, at), h("mark", null, text.slice(at, at + needle.length)));
    from = at + needle.length;
  }
  return [...parts, text.slice(from)];
};

const turnsOf = (answer, wanted) => answer.turns.map((turn) => h("div", { class: `turn ${turn.role === "assistant" ? "model" : "environment"}` },
  h("b", null, turn.role), h("span", { class: "note" }, ` ${turn.num_tokens} tokens`), h("pre", null, marked(turn.text, wanted))));

// `at` names the answer: { run, kind, step, index, sample, label }; `tokens` says whether its step has token data.
export const answerCard = (answer, { at, scale, wanted = "", isMatch = true, hasTokens = false, draw }) => {
  const body = h("div", { class: "answer-text" });
  const plain = () => body.replaceChildren(...(answer.turns ? turnsOf(answer, wanted)
    : [h("pre", { class: answer.text ? "" : "nothing" }, answer.text ? marked(answer.text, wanted) : "(empty)")]));
  plain();
  const toggle = hasTokens ? button("tokens", async () => {
    if (toggle.getAttribute("aria-pressed") === "true") { toggle.setAttribute("aria-pressed", "false"); plain(); return; }
    const found = await get(`runs/${at.run}/tokens/${at.step}/${draw}/${at.sample}`).catch(() => null);
    toggle.setAttribute("aria-pressed", "true");
    const show = (mode) => body.replaceChildren(found ? tokenView(found, mode, (next) => { localStorage.setItem("posttrain-token-mode", next); show(next); })
      : h("p", { class: "note" }, "The tokens of this answer were not kept: a run keeps those of some groups."));
    show(localStorage.getItem("posttrain-token-mode") || "logprob");
  }, { class: "tiny", "aria-pressed": "false" }) : null;
  const parts = Object.entries(answer.parts || {});
  return h("article", { class: `card answer${isMatch ? "" : " other"}${answer.error ? " unscored" : ""}`, style: { "--tone-share": scale(answer.reward) } },
    h("header", null, h("b", { class: "reward" }, answer.reward === null ? "unscored" : short(answer.reward)),
      h("span", null, `answer ${at.sample + 1}`),
      answer.advantage ? h("span", null, `advantage ${answer.advantage > 0 ? "+" : ""}${short(answer.advantage)}`) : null,
      h("span", null, `${answer.num_tokens} tokens`),
      answer.finish_reason === "length" ? h("span", { class: "badge warning" }, "cut off") : null,
      parts.length > 1 ? parts.map(([name, value]) => h("span", { class: "badge" }, `${name} ${short(value)}`)) : null,
      Object.entries(answer.counts || {}).filter(([, value]) => value).map(([name, value]) => h("span", { class: "badge" }, `${name.replaceAll("_", " ")} ${short(value)}`)),
      h("span", { class: "tools" }, toggle,
        button("compare", () => pin([at.run, at.kind, at.step, at.index, at.sample].join(":"), `${at.label}, answer ${at.sample + 1}`), { class: "tiny" }))),
    answer.error ? h("p", { class: "why" }, answer.error) : null, body);
};

// A run keeps a limited number of images: of others there is the size only.
const picture = (image, index, run) => {
  const words = `image ${index + 1} of the prompt, ${image.width} × ${image.height} pixels`;
  const element = h("img", { src: address(`runs/${run}/images/${encodeURIComponent(image.file)}`), alt: words, title: words, loading: "lazy" });
  element.addEventListener("error", () => element.replaceWith(h("span", { class: "note" }, `${words}, not kept`)));
  return element;
};

export const groupView = (group, { at, scale, wanted, matching, hasTokens }) => {
  const reference = group.reference;
  return [
    h("details", { class: "card prompt", open: true }, h("summary", null, "Prompt"), h("pre", null, marked(group.prompt, wanted)),
      group.images?.length ? h("div", { class: "pictures" }, group.images.map((image, index) => picture(image, index, at.run))) : null),
    reference === null || reference === undefined ? null
      : h("p", { class: "expected" }, h("b", null, "Expected "), h("code", null, typeof reference === "string" ? reference : JSON.stringify(reference))),
    h("div", { class: "answers" }, group.completions.map((answer, sample) => answerCard(answer, {
      at: { ...at, sample }, scale, wanted, hasTokens, draw: group.draw, isMatch: !matching || matching.includes(sample) }))),
  ];
};
