"use strict";
// Picking a plan: its panel is shown, its timeline drawn, every link to it marked. Sorting the table. Comparing two.
const { plans, chosen } = JSON.parse(document.getElementById("data").textContent);
const drawn = new Set();

const drawTimeline = async (number) => {
  const plan = plans[number - 1], figure = document.querySelector(`.step[data-plan="${number}"]`);
  if (!figure || !plan.timeline || drawn.has(number)) return;
  drawn.add(number);
  const rows = await unpacked(plan.timeline);
  new Lanes(figure, plan.timeline, rows, plan.row_name);
  figure.querySelector(".still")?.remove();
};

const shownNumber = () => {
  const number = Number(location.hash.replace("#plan-", ""));
  return Number.isInteger(number) && number >= 1 && number <= plans.length ? number : chosen;
};

const pick = (number, { speak = true } = {}) => {
  for (const panel of document.querySelectorAll(".panel")) panel.hidden = Number(panel.dataset.plan) !== number;
  for (const mark of document.querySelectorAll("a[data-plan], tr[data-plan]")) {
    const here = Number(mark.dataset.plan) === number;
    mark.classList.toggle("picked", here);
    const link = mark.matches("a") ? mark : mark.querySelector("a");
    if (here) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
  }
  if (speak) document.querySelector(".spoken").textContent = `Shown below: plan ${number}, step ${formatSeconds(plans[number - 1].step_seconds)}.`;
  drawTimeline(number);
  if (number !== chosen) chooseTwo(chosen, number);
};

const sortBy = (column, head) => {
  const up = head.getAttribute("aria-sort") !== "ascending", body = head.closest("table").tBodies[0];
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = (row) => Number(row.cells[column].dataset.value);
  body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * (value(a) - value(b))));
};

const makeSortable = (table) => [...table.tHead.rows[0].cells].forEach((head, column) => {
  if (head.textContent === "plan") return;
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent, className: "sort" });
  button.addEventListener("click", () => sortBy(column, head));
  head.replaceChildren(button);
});

const chosenTwo = () => [document.getElementById("left"), document.getElementById("right")];

const chooseTwo = (...numbers) => {
  chosenTwo().forEach((select, index) => { select.value = numbers[index]; });
  compare(plans, numbers);
};

const makeChoices = () => {
  for (const select of chosenTwo()) {
    select.append(...plans.map((plan, index) => new Option(`${index + 1}: ${plan.name}`, index + 1)));
    select.addEventListener("change", () => compare(plans, chosenTwo().map((entry) => Number(entry.value))));
  }
  chooseTwo(chosen, chosen === 1 ? 2 : 1);
};

document.body.classList.add("scripted");
makeSortable(document.querySelector(".plans"));
if (plans.length > 1) makeChoices();
pick(shownNumber(), { speak: false });
document.addEventListener("click", (event) => {
  const mark = event.target.closest("a[href^='#plan-'], .plans tbody tr");
  if (!mark || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const number = Number(mark.dataset.plan || mark.closest("tr").dataset.plan);
  history.replaceState(null, "", `#plan-${number}`);
  pick(number);
});
addEventListener("hashchange", () => pick(shownNumber()));
