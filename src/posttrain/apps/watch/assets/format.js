// Numbers and times as people read them.
export { short } from "./chart.js";

export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

export const plural = (many, word) => `${count(many)} ${word}${many === 1 ? "" : "s"}`;

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toPrecision(2)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
};

export const ago = (seconds) => {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 5) return "now";
  for (const [size, word] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${word} ago`;
  }
  return `${Math.round(seconds)} s ago`;
};

export const when = (iso) => (iso ? `${String(iso).slice(0, 16).replace("T", " ")} UTC` : "–");

export const bytes = (size) => (size === undefined ? "–" : size > 2 ** 30 ? `${(size / 2 ** 30).toFixed(2)} GiB` : `${(size / 2 ** 20).toFixed(1)} MiB`);
