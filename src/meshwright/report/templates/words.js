"use strict";
// Numbers as meshwright.spec.units writes them.
const three = (number) => (number >= 99.95 || number === 0 ? Math.round(number).toLocaleString("en-US") : number.toFixed(number >= 9.995 ? 1 : 2));
const formatSeconds = (seconds) => {
  if (!Number.isFinite(seconds)) return "never";
  if (seconds < 0) return "-" + formatSeconds(-seconds);
  if (seconds < 0.9995e-3) return three(seconds * 1e6) + " us";
  if (seconds < 0.9995) return three(seconds * 1e3) + " ms";
  if (seconds < 119.5) return three(seconds) + " s";
  const [big, size, small, part] = seconds < 7199.5 ? ["min", 60, "s", 1] : seconds < 172770 ? ["h", 3600, "min", 60] : ["d", 86400, "h", 3600];
  const parts = Math.round(seconds / part), whole = Math.floor((parts * part) / size);
  return `${whole.toLocaleString("en-US")} ${big} ${parts - (whole * size) / part} ${small}`;
};
const formatBytes = (count) => {
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = Math.abs(count), index = 0;
  while (size >= 0.9995 * 1024 && index + 1 < names.length) { size /= 1024; index += 1; }
  return `${count < 0 ? "-" : ""}${Number.isInteger(size) ? size.toLocaleString("en-US") : three(size)} ${names[index]}`;
};
const leastShare = 0.0005;
const formatPercent = (fraction) => (100 * fraction).toFixed(1) + " %";
const signed = (show, value) => (value >= 0 ? "+" : "") + show(value);
