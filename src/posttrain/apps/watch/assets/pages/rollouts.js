// Every group of every step: a list that can be searched and filtered, and the group that is chosen.
import { setQuery } from "../address.js";
import { get, watch } from "../api.js";
import { groupView, marked, rewardDots, rewardScale } from "../answers.js";
import { button, h, link, select } from "../dom.js";
import { count, plural, short } from "../format.js";
import { diffAddress } from "../pins.js";
import { runHeader } from "../run_parts.js";
import { before } from "../chart.js";

const FILTERS = ["reward_min", "reward_max", "spread_min", "spread_max", "length_min", "length_max", "finish", "error", "part", "part_min", "part_max"];
const SORTS = [["order", "in order"], ["reward", "highest reward"], ["reward_up", "lowest reward"], ["spread", "largest spread"], ["length", "longest"], ["length_up", "shortest"]];
const KEYS = "Keys: j and k for groups, ← and → for steps, / to search.";

export const open = async ([id], query) => {
  let [run, available] = await Promise.all([get(`runs/${id}`), null]);
  let listed = [], matching = new Map(), request = null;
  const parts = [...run.charts.flatMap((chart) => chart.curves.map(([key]) => key)), ...run.other_keys]
    .filter((key) => key.startsWith("train/reward/")).map((key) => key.slice("train/reward/".length));

  // ------------------------------------------------------------ the address

  const kind = () => (query.get("kind") === "validation" ? "validation" : "train");
  const steps = () => available?.steps ?? [];
  const step = () => {
    const asked = query.get("step");
    if (asked === null || asked === "last") return steps().at(-1);
    return steps()[Math.max(0, before(steps(), Number(asked)))];
  };
  const follows = () => query.get("step") === null || query.get("step") === "last";
  const filters = () => Object.fromEntries([["q", query.get("q")], ["task", query.get("task")], ...FILTERS.map((name) => [name, query.get(name)])].filter(([, value]) => value));
  const everywhere = () => query.get("in") === "all" || query.has("task");

  // ------------------------------------------------------------ controls

  const field = (name, label, width = "5em") => h("label", null, label, " ", h("input", { type: "number", step: "any", style: { width }, value: query.get(name) ?? "", "data-filter": name,
    onchange: (event) => setQuery({ [name]: event.target.value, group: null }) }));
  const between = (name, label) => h("span", { class: "between" }, field(`${name}_min`, `${label} from`), field(`${name}_max`, "to"));
  const slider = h("input", { type: "range", min: 0, "aria-label": "Step", oninput: () => { stepField.value = steps()[slider.value]; },
    onchange: () => setQuery({ step: Number(slider.value) === steps().length - 1 ? "last" : steps()[slider.value], group: null }) });
  const stepField = h("input", { type: "number", "aria-label": "Step number", onchange: () => setQuery({ step: stepField.value, group: null }) });
  const move = (by) => {
    const place = steps().indexOf(step()) + by;
    if (place >= 0 && place < steps().length) setQuery({ step: place === steps().length - 1 ? "last" : steps()[place], group: null });
  };
  const search = h("input", { type: "search", placeholder: "Search prompts and answers", "aria-label": "Search prompts and answers", value: query.get("q") ?? "",
    onchange: () => setQuery({ q: search.value, group: null }) });
  const scope = select([["", "in this step"], ["all", "in all steps"]], query.get("in") || "", (value) => setQuery({ in: value, group: null }), { "aria-label": "Where to search" });
  const kindSelect = select([["train", "training"], ["validation", "validation"]], kind(), (value) => setQuery({ kind: value, step: null, group: null }), { "aria-label": "Which rollouts" });
  const sortSelect = select(SORTS, query.get("sort") || "order", (value) => setQuery({ sort: value }), { "aria-label": "Order of groups" });
  const clear = button("clear", () => setQuery(Object.fromEntries([...FILTERS, "q", "in", "task", "group"].map((name) => [name, null]))), { class: "quiet" });
  const filterCount = h("i", { class: "count" });
  const filterBox = h("details", { class: "filters", open: FILTERS.some((name) => query.get(name)) }, h("summary", null, "Filters ", filterCount),
    h("div", { class: "bar" }, between("reward", "Reward"), between("spread", "Spread of the group"), between("length", "Tokens"),
      select([["", "ended anyhow"], ["stop", "stopped"], ["length", "cut off"]], query.get("finish") || "", (value) => setQuery({ finish: value, group: null }), { "aria-label": "How the answer ended" }),
      select([["", "scored or not"], ["false", "scored"], ["true", "unscored"]], query.get("error") || "", (value) => setQuery({ error: value, group: null }), { "aria-label": "Scored or not" }),
      parts.length ? h("span", { class: "between" }, select([["", "any part"], ...parts.map((one) => [one, one])], query.get("part") || "", (value) => setQuery({ part: value, group: null }), { "aria-label": "Part of the reward" }),
        field("part_min", "from"), field("part_max", "to")) : null));
  const list = h("div", { class: "groups", role: "list" }), said = h("p", { class: "note", role: "status" }), detail = h("div", { class: "detail" });

  const sync = () => {
    kindSelect.value = kind();
    const place = Math.max(0, steps().indexOf(step()));
    slider.max = Math.max(0, steps().length - 1);
    slider.value = place;
    stepField.value = step() ?? "";
    scope.value = everywhere() ? "all" : "";
    sortSelect.value = query.get("sort") || "order";
    if (document.activeElement !== search) search.value = query.get("q") ?? "";
    filterBox.querySelectorAll("[data-filter]").forEach((input) => { input.value = query.get(input.dataset.filter) ?? ""; });
    const used = FILTERS.filter((name) => query.get(name)).length;
    filterCount.textContent = used || "";
    clear.hidden = !used && !query.get("q") && !query.get("task");
  };

  // ------------------------------------------------------------ the list

  const row = (hit) => {
    const at = `${hit.step}/${hit.index}`;
    const text = hit.snippet || hit.prompt;
    return h("a", { role: "listitem", class: "group-row", "data-at": at, href: addressOf(hit) },
      h("span", { class: "line" }, h("b", { class: "mean" }, hit.mean === null ? "unscored" : short(hit.mean)), rewardDots(hit.rewards, scale(), hit.matching.length < hit.rewards.length ? hit.matching : null),
        h("span", { class: "id" }, everywhere() ? `step ${hit.step} · ${hit.id}` : hit.id)),
      h("span", { class: "text" }, marked(text.replaceAll(/\s+/g, " "), query.get("q"))),
      h("span", { class: "line note" }, `spread ${short(hit.spread)} · ${Math.round(hit.mean_length ?? 0)} tokens`,
        hit.num_cut ? h("span", { class: "badge warning" }, `${hit.num_cut} cut off`) : null, hit.num_errors ? h("span", { class: "badge error" }, `${hit.num_errors} unscored`) : null,
        hit.num_turns ? h("span", { class: "badge" }, `${hit.num_turns} turns`) : null));
  };
  const scale = () => rewardScale(listed.flatMap((hit) => hit.rewards));
  const addressOf = (hit) => {
    const params = new URLSearchParams(query);
    params.set("step", hit.step);
    params.set("group", hit.index);
    return `#/run/${id}/rollouts?${params}`;
  };
  const add = (hits) => {
    hits.forEach((hit) => matching.set(`${hit.step}/${hit.index}`, hit.matching));
    listed.push(...hits);
    list.append(...hits.map(row));
  };

  const loadList = async () => {
    request?.abort();
    const mine = request = new AbortController();
    listed = []; matching = new Map();
    list.replaceChildren();
    try {
      if (everywhere()) await searchAll(mine.signal);
      else await loadStep(0, mine.signal);
    } catch (error) {
      if (error.name !== "AbortError") said.textContent = error.message;
    }
  };
  const loadStep = async (offset, signal) => {
    if (step() === undefined) { said.textContent = "There are no rollouts."; return; }
    const found = await get(`runs/${id}/rollouts/${kind()}/${step()}`, { ...filters(), sort: query.get("sort"), offset }, signal);
    add(found.groups.map((one) => ({ step: step(), ...one })));
    said.textContent = (found.matching === found.total ? plural(found.total, "group") : `${count(found.matching)} of ${plural(found.total, "group")}`)
      + (found.unreadable ? ` · ${plural(found.unreadable, "row")} cannot be read` : "") + (found.is_cut ? " · the step has more than is shown" : "");
    if (offset + found.groups.length < found.matching) {
      const more = button("more groups", () => { more.remove(); loadStep(offset + found.groups.length); });
      list.append(more);
    }
  };
  const searchAll = async (signal, cursor = null, enough = 60) => {
    for (;;) {
      const found = await get(`runs/${id}/rollouts/${kind()}/search`, { ...filters(), ...(cursor ?? {}) }, signal);
      add(found.hits);
      cursor = found.cursor;
      said.textContent = `${plural(listed.length, "group")} found${cursor ? `, ${plural(found.num_steps_left, "step")} left` : ""}`;
      if (!cursor) return;
      if (listed.length >= enough) {
        const more = button("search on", () => { more.remove(); searchAll(signal, cursor, listed.length + 60); });
        list.append(more);
        return;
      }
    }
  };

  // ------------------------------------------------------------ the group

  let shownGroup = null;
  const loadGroup = async () => {
    const index = query.get("group") ?? (matchMedia("(min-width: 900px)").matches && listed.length ? listed[0].index : null);
    const at = query.get("group") === null && listed.length ? listed[0].step : step();
    page.element.classList.toggle("reading", query.get("group") !== null);
    list.querySelectorAll(".group-row").forEach((one) => one.toggleAttribute("aria-current", one.dataset.at === `${at}/${index}`));
    list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
    if (index === null || at === undefined) { detail.replaceChildren(h("p", { class: "empty" }, "No group is chosen.")); shownGroup = null; return; }
    const key = `${kind()}/${at}/${index}`;
    const found = await get(`runs/${id}/rollouts/${kind()}/${at}/${index}`).catch(() => null);
    if (!found) { detail.replaceChildren(h("p", { class: "empty" }, "This group is not there any more.")); return; }
    const { group } = found;
    const label = `step ${at}, ${group.id}`;
    const others = h("div", { class: "over-steps" });
    shownGroup = key;
    detail.replaceChildren(
      h("div", { class: "bar" }, h("a", { class: "back", href: "#", onclick: (event) => { event.preventDefault(); setQuery({ group: null }); } }, "← groups"),
        h("h2", null, group.id), h("span", { class: "note" }, `step ${at} · group ${Number(index) + 1} of ${found.num_groups}`),
        button("this prompt over steps", () => overSteps(others, group, at, Number(index), id), { class: "tiny" }),
        select([["", "in another run"], ...allRuns.map((one) => [one.id, one.name])], "", (other) => other && overSteps(others, group, at, Number(index), other), { "aria-label": "This prompt in another run" })),
      others,
      ...groupView(group, { at: { run: id, kind: kind(), step: at, index: Number(index), label }, scale: rewardScale([...listed.flatMap((hit) => hit.rewards), ...group.completions.map((one) => one.reward)]), wanted: query.get("q") ?? "", matching: matching.get(`${at}/${index}`),
        hasTokens: kind() === "train" && available.with_tokens.includes(at) }).filter(Boolean));
  };

  // Where else the same task was sampled, in this run or in another one, each with a word diff against the best answer here.
  const overSteps = async (into, group, at, index, other) => {
    const best = (rewards) => rewards.reduce((top, reward, place) => ((reward ?? -Infinity) > (rewards[top] ?? -Infinity) ? place : top), 0);
    const here = [id, kind(), at, index, best(group.completions.map((one) => one.reward))].join(":");
    const rows = h("tbody"), state = h("p", { class: "note", role: "status" }, "searching …");
    into.replaceChildren(h("section", { class: "card" }, h("h3", null, other === id ? "This prompt over steps" : `This prompt in ${allRuns.find((one) => one.id === other)?.name}`), h("div", { class: "scroll" }, h("table", null, rows)), state));
    let cursor = {}, found = 0;
    while (cursor && into.isConnected && found < 200) {
      const answer = await get(`runs/${other}/rollouts/${kind()}/search`, { task: group.id, ...cursor });
      for (const hit of answer.hits) {
        found += 1;
        const there = [other, kind(), hit.step, hit.index, best(hit.rewards)].join(":");
        rows.append(h("tr", null, h("td", null, link(`#/run/${other}/rollouts?kind=${kind()}&step=${hit.step}&group=${hit.index}`, `step ${hit.step}`)),
          h("td", null, rewardDots(hit.rewards, scale())), h("td", { class: "n" }, short(hit.mean)), h("td", { class: "n" }, `${Math.round(hit.mean_length ?? 0)} tokens`),
          h("td", null, there === here ? "this one" : link(diffAddress(there, here), "word diff"))));
      }
      cursor = answer.cursor;
      state.textContent = cursor ? `${plural(answer.num_steps_left, "step")} left` : found ? "" : "It was not sampled there.";
    }
  };

  // ------------------------------------------------------------ the page

  const load = async () => {
    available = await get(`runs/${id}/rollouts/${kind()}`);
    sync();
    await loadList();
    await loadGroup();
  };
  const { runs } = await get("runs");
  const allRuns = runs.filter((one) => one.id !== id);
  const keys = (event) => {
    if (event.target.closest("input, select, textarea, svg") || event.ctrlKey || event.metaKey || event.altKey) return;
    const place = listed.findIndex((hit) => `${kind()}/${hit.step}/${hit.index}` === shownGroup);
    const go = { j: 1, k: -1 }[event.key];
    if (go && listed[place + go]) location.hash = addressOf(listed[place + go]).slice(1);
    else if (event.key === "ArrowLeft") move(-1);
    else if (event.key === "ArrowRight") move(1);
    else if (event.key === "/") { event.preventDefault(); search.focus(); }
    else return;
    event.preventDefault();
  };
  document.addEventListener("keydown", keys);
  const head = h("div", null, runHeader(run, "Rollouts"));
  const page = {
    title: `Rollouts · ${run.title}`,
    element: h("div", { class: "rollouts" }, head,
      h("div", { class: "card controls" },
        h("div", { class: "bar" }, kindSelect, h("span", { class: "stepper" }, button("←", () => move(-1), { "aria-label": "Previous step" }), slider,
          button("→", () => move(1), { "aria-label": "Next step" }), stepField), search, scope, clear),
        filterBox),
      h("div", { class: "panes" }, h("div", { class: "list" }, h("div", { class: "bar" }, said, sortSelect), list, h("p", { class: "hint keys" }, KEYS)), detail)),
    update: async (params) => {
      const fixed = (one) => [...["kind", "sort", "q", "task", "in", ...FILTERS].map((name) => one.get(name) ?? ""), everywhereIn(one) ? "" : one.get("step") ?? "last"].join("\n");
      const everywhereIn = (one) => one.get("in") === "all" || one.has("task");
      const changed = fixed(params) !== fixed(query), otherKind = params.get("kind") !== query.get("kind");
      query = params;
      if (otherKind) available = await get(`runs/${id}/rollouts/${kind()}`);
      sync();
      if (changed) await loadList();
      await loadGroup();
    },
  };
  await load();
  const end = watch(id, async () => {
    const last = steps().at(-1);
    available = await get(`runs/${id}/rollouts/${kind()}`);
    sync();
    if (follows() && steps().at(-1) !== last && query.get("group") === null && !everywhere()) { await loadList(); await loadGroup(); }
    run = await get(`runs/${id}`);
    head.replaceChildren(runHeader(run, "Rollouts"));
  });
  page.stop = () => { end(); request?.abort(); document.removeEventListener("keydown", keys); };
  return page;
};
