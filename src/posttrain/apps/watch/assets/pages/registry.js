// Registered models: versions, stages, and who moved them when.
import { get } from "../api.js";
import { h, link, section, table } from "../dom.js";
import { bytes, short, when } from "../format.js";

const STAGE_KIND = { production: "good", canary: "run" };

export const open = async ([id]) => {
  const { registries } = await get("registries");
  const chosen = id || (registries.length === 1 ? registries[0].id : null);
  if (!chosen) {
    return { title: "Registry", element: h("div", null, h("h1", null, "Registry"), registries.length
      ? h("ul", null, registries.map((one) => h("li", null, link(`#/registry/${one.id}`, one.name))))
      : h("p", { class: "empty" }, "No registry in these folders. Name one with ", h("code", null, "--registry"), ".")) };
  }
  const found = await get(`registries/${chosen}`);
  return { title: "Registry", element: h("div", null, h("h1", null, "Registry"),
    found.problem ? h("p", { class: "empty", role: "alert" }, found.problem) : "",
    !found.problem && !found.models.length ? h("p", { class: "empty" }, "The registry is empty.") : "",
    found.models.map((model) => section(model.name,
      table(["version", "stage", "gate", "base model", "metrics", "size", "added", "by", "note"], model.versions.map((one) => [one.version,
        h("td", null, h("span", { class: `badge ${STAGE_KIND[one.stage] || ""}` }, one.stage)), one.verdict ?? "–", one.base_model ?? "–",
        Object.entries(one.metrics).slice(0, 3).map(([name, value]) => `${name} ${short(value)}`).join(", ") || "–", bytes(one.num_bytes), when(one.at), one.by, one.note]), { class: "card" }),
      model.history.length ? h("details", { open: true }, h("summary", null, "History"), table(["when", "who", "what", "why"], model.history.map((one) => [when(one.at), one.by,
        one.refused ? `${one.action} of version ${one.version} refused: ${one.refused}`
          : one.moves.map(([version, before, after]) => `version ${version}: ${before} → ${after}`).join(", ") + (one.forced ? " (forced)" : ""), one.why]), { class: "card" })) : "")) ) };
};
