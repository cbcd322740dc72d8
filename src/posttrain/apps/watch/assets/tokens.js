// The tokens of an answer, coloured by a number of each.
import { h, select } from "./dom.js";
import { short } from "./format.js";

// Two-sided colours have a middle; the others begin at nothing. `full` is the value with the full colour, if it is fixed.
const MODES = {
  logprob: { name: "log-probability", word: "The darker, the less likely the sampler found the token.", full: 5, size: (value) => -value, sided: false },
  difference: { name: "sampler − trainer", word: "Log-probability of the sampler minus that of the trainer. Green: the sampler found it likelier.", sided: true },
  kl: { name: "KL to the reference", word: "The darker, the further the policy has moved from the reference at this token.", sided: false },
  advantage: { name: "advantage", word: "Green tokens are made likelier by this step, red ones less likely.", sided: true },
};

export const tokenView = (found, mode, onmode) => {
  const modes = Object.entries(MODES).filter(([key]) => found[key]);
  const { size = (value) => value, full, sided, word, name } = MODES[mode] && found[mode] ? MODES[mode] : MODES[mode = "logprob"];
  const values = found[mode].map((value) => (value === null ? null : size(value)));
  const counted = values.filter((value, index) => value !== null && found.trained[index]).map(Math.abs).sort((a, b) => a - b);
  const top = full || counted[Math.floor(0.98 * (counted.length - 1))] || 1;
  const text = h("pre", { class: "tokens", "data-mode": mode }, found.pieces.map((piece, index) => {
    const value = values[index];
    if (!found.trained[index]) return h("span", { class: "tok foreign", title: "not written by the model" }, piece);
    const share = value === null ? 0 : Math.min(1, Math.abs(value) / top);
    const tip = modes.map(([key, { name: label }]) => `${label} ${short(found[key][index])}`).join("\n");
    return h("span", { class: `tok ${!sided ? "one" : value >= 0 ? "plus" : "minus"}`, style: { "--share": `${Math.round(85 * share)}%` },
      title: `${JSON.stringify(piece)} (${found.ids[index]})\n${tip}` }, piece || "·");
  }));
  return h("div", { class: "token-view" },
    h("div", { class: "bar" }, select(modes.map(([key, one]) => [key, one.name]), mode, onmode, { "aria-label": "Colour tokens by" }),
      h("span", { class: "scale" }, sided ? h("span", { class: "tok minus", style: { "--share": "85%" } }, short(-top)) : h("span", { class: "tok" }, "0"),
        sided ? h("span", { class: "tok" }, "0") : null,
        h("span", { class: `tok ${sided ? "plus" : "one"}`, style: { "--share": "85%" } }, mode === "logprob" ? `−${short(top)}` : short(top))),
      h("span", { class: "hint" }, word)), text, h("span", { class: "hidden" }, `Coloured by ${name}.`));
};
