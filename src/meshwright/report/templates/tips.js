const tip = document.getElementById("tip");
const show = (event) => {
  const mark = event.target.closest ? event.target.closest(".tip") : null;
  if (!mark) { tip.hidden = true; return; }
  const title = mark.querySelector("title");
  if (title) { mark.dataset.tip = title.textContent; mark.setAttribute("aria-label", title.textContent); title.remove(); }
  if (mark.title) { mark.dataset.tip = mark.title; mark.removeAttribute("title"); }
  tip.textContent = mark.dataset.tip || "";
  tip.hidden = !tip.textContent;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = Math.max(8, Math.min(event.clientX + 12, room)) + "px";
  tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
};
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
