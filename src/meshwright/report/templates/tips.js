const tip = document.getElementById("tip");
const tell = (mark, left, top) => {
  const title = mark.querySelector("title");
  if (title) { mark.dataset.tip = title.textContent; mark.setAttribute("aria-label", title.textContent); title.remove(); }
  if (mark.title) { mark.dataset.tip = mark.title; mark.removeAttribute("title"); }
  tip.textContent = mark.dataset.tip || "";
  tip.hidden = !tip.textContent;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = Math.max(8, Math.min(left + 12, room)) + "px";
  tip.style.top = Math.max(8, top - tip.offsetHeight - 12) + "px";
};
const show = (event) => {
  const mark = event.target.closest ? event.target.closest(".tip") : null;
  if (mark) tell(mark, event.clientX, event.clientY); else tip.hidden = true;
};
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
document.addEventListener("focusin", (event) => {
  const mark = event.target.closest(".tip");
  if (!mark || !mark.matches(":focus-visible")) { tip.hidden = true; return; }
  const box = mark.getBoundingClientRect();
  tell(mark, box.right, box.top);
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
