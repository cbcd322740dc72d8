// Elements that several pages have.
import { h, s } from "./chart.js";

export { h, s };
export const link = (href, ...children) => h("a", { href }, ...children);
export const button = (text, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, text);
export const section = (title, ...children) => h("section", null, h("h2", null, title), ...children);
export const note = (...text) => h("p", { class: "note" }, ...text);

export const table = (headings, rows, props = {}) =>
  h("div", { class: "scroll" }, h("table", props,
    headings.length ? h("thead", null, h("tr", null, headings.map((one, index) => h("th", { scope: "col", class: rows[0]?.[index]?.classList?.contains("n") ? "n" : null }, one)))) : null,
    h("tbody", null, rows.map((row) => h("tr", null, row.map((cell) =>
      cell && cell.tagName === "TD" ? cell : h("td", null, cell)))))));

export const number = (text) => h("td", { class: "n" }, text);

export const select = (options, value, onchange, props = {}) => {
  const element = h("select", { onchange: (event) => onchange(event.target.value), ...props },
    options.map(([key, text]) => h("option", { value: key }, text)));
  element.value = value;
  return element;
};
