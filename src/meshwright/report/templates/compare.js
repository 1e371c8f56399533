"use strict";
// Two plans side by side: figures, settings that differ, lines of the step and memory with their differences.
// A row of `texts` or nodes: headings of a table's columns, or a row whose first cell names it.
const cells = (kind, texts) => {
  const row = document.createElement("tr");
  row.append(...texts.map((text, index) => {
    const heads = text && (kind === "head" || !index), cell = document.createElement(heads ? "th" : "td");
    if (heads) cell.scope = kind === "head" ? "col" : "row";
    if (index) cell.className = "num";
    if (text instanceof Node) cell.append(text); else cell.textContent = text;
    return cell;
  }));
  return row;
};

// A bar to the right for more, to the left for less; `share` is of the largest difference of its table.
const lean = (text, share) => {
  const box = Object.assign(document.createElement("span"), { className: "lean" });
  const bar = Object.assign(document.createElement("i"), { className: share > 0 ? "more" : "less" });
  bar.style.width = 50 * Math.min(Math.abs(share), 1) + "%";
  const words = Object.assign(document.createElement("span"), { textContent: text });
  box.append(bar);
  const both = document.createElement("span");
  both.className = "leaning";
  both.append(box, words);
  return both;
};

const differenceTable = (title, left, right, heads, show) => {
  const first = new Map(left), second = new Map(right), sum = (map) => [...map.values()].reduce((total, value) => total + value, 0);
  const least = 2e-4 * Math.max(sum(first), sum(second));
  const names = [...new Set([...first.keys(), ...second.keys()])].filter((name) => Math.max(first.get(name) || 0, second.get(name) || 0) > least);
  const gaps = names.map((name) => (second.get(name) || 0) - (first.get(name) || 0));
  const largest = Math.max(...gaps.map(Math.abs), 1e-30);
  const rows = names.map((name, index) => cells("body", [
    name, show(first.get(name) || 0), show(second.get(name) || 0), Math.abs(gaps[index]) < least ? "alike" : lean(signed(show, gaps[index]), gaps[index] / largest),
  ]));
  const total = cells("body", [title === "Memory" ? "peak" : "step", show(sum(first)), show(sum(second)), signed(show, sum(second) - sum(first))]);
  total.className = "sum";
  return block(title, [cells("head", ["", ...heads, "difference"])], [...rows, total]);
};

const settingsTable = (left, right, heads) => {
  const theirs = new Map(right), differing = left.filter(([name, value]) => theirs.get(name) !== value);
  const alike = left.filter(([name, value]) => theirs.get(name) === value).map(([name, value]) => `${name} ${value}`);
  const found = block("Settings that differ", [cells("head", ["", ...heads])], differing.map(([name, value]) => cells("body", [name, value, theirs.get(name)])));
  found.append(Object.assign(document.createElement("p"), { className: "quiet", textContent: `Alike: ${alike.join("; ") || "nothing"}.` }));
  found.className = "wide";
  return found;
};

const block = (title, head, body) => {
  const part = document.createElement("section"), scroll = Object.assign(document.createElement("div"), { className: "scroll" });
  const table = document.createElement("table"), top = document.createElement("thead"), rest = document.createElement("tbody");
  top.append(...head);
  rest.append(...(body.length ? body : [cells("body", ["nothing"])]));
  table.append(top, rest);
  scroll.append(table);
  part.append(Object.assign(document.createElement("h3"), { textContent: title }), scroll);
  return part;
};

const between = (plan) => `${formatSeconds(plan.step_seconds * plan.error_band[0])} to ${formatSeconds(plan.step_seconds * plan.error_band[1])}`;

const verdict = (left, right, numbers) => {
  const change = right.step_seconds / left.step_seconds - 1;
  const sum = (plan) => plan.memory.parts.reduce((total, [, count]) => total + count, 0), room = sum(right) - sum(left);
  const pace = Math.abs(change) < leastShare ? "takes as long as" : `takes ${formatPercent(Math.abs(change))} ${change > 0 ? "more" : "less"} time than`;
  const size = Math.abs(room) < 1 ? "in as much memory" : `and ${formatBytes(Math.abs(room))} ${room > 0 ? "more" : "less"} memory`;
  const bands = left.error_band[1] * left.step_seconds > right.error_band[0] * right.step_seconds && right.error_band[1] * right.step_seconds > left.error_band[0] * left.step_seconds;
  const sure = left.error_band[1] > left.error_band[0] ? ` Their bands are ${between(left)} and ${between(right)}${bands ? "; they overlap, but an error that both plans share does not change their order" : ""}.` : "";
  return `Plan ${numbers[1]} ${pace} plan ${numbers[0]} ${size}.${sure}`;
};

const compare = (plans, numbers) => {
  const [left, right] = numbers.map((number) => plans[number - 1]), heads = numbers.map((number) => `plan ${number}`);
  const words = Object.assign(document.createElement("p"), { textContent: verdict(left, right, numbers) });
  const grid = Object.assign(document.createElement("div"), { className: "compared" });
  grid.append(
    settingsTable(left.settings, right.settings, heads),
    differenceTable("Step", left.terms, right.terms, heads, formatSeconds),
    differenceTable("Memory", left.memory.parts, right.memory.parts, heads, formatBytes),
  );
  document.getElementById("difference").replaceChildren(words, grid);
};
