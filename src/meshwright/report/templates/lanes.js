"use strict";
// The timeline of one plan: every pipeline rank a lane on one canvas, drawn anew for the part in sight.
const inflated = async (text) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
};

// The rows of `packed` as spans [kind, microbatch, start in seconds], in order of start.
const unpacked = async (packed) => {
  const rows = await inflated(packed.rows);
  return rows.map(([kinds, microbatches, steps]) => {
    let tick = 0;
    return kinds.map((kind, index) => [kind, microbatches[index], ((tick += steps[index]) * packed.seconds) / packed.ticks]);
  });
};

const THIN = 4;

class Lanes {
  constructor(figure, packed, rows, rowName) {
    Object.assign(this, { figure, packed, rows, rowName, zoom: 1, chosen: null });
    this.lane = rows.length <= 8 ? 26 : rows.length <= 32 ? 16 : 11;
    this.names = document.createElement("div");
    this.names.className = "rows";
    this.names.setAttribute("aria-hidden", "true");
    this.names.style.lineHeight = this.lane + "px";
    const every = this.lane > 12 ? 1 : 4;
    this.names.append(...rows.map((_, rank) => Object.assign(document.createElement("span"), { textContent: rank % every ? "\u00a0" : `${rowName} ${rank}` })));
    this.sight = document.createElement("div");
    this.sight.className = "sight";
    this.sight.tabIndex = 0;
    this.sight.setAttribute("role", "application");
    this.sight.setAttribute("aria-label", "Timeline. Arrow keys go from action to action and from rank to rank, plus and minus zoom, 0 shows the whole step.");
    this.canvas = document.createElement("canvas");
    this.canvas.className = "tip";
    this.canvas.setAttribute("aria-hidden", "true");
    this.spacer = document.createElement("div");
    this.spacer.className = "spacer";
    this.spacer.append(this.canvas);
    this.sight.append(this.spacer);
    this.said = Object.assign(document.createElement("p"), { className: "said", textContent: "Point at an action to read it, or focus the timeline and use the arrow keys." });
    this.said.setAttribute("role", "status");
    figure.querySelector(".lanes").replaceChildren(this.names, this.sight, this.said);
    this.listen();
    this.draw();
  }

  listen() {
    const redraw = () => requestAnimationFrame(() => this.draw());
    this.sight.addEventListener("scroll", redraw, { passive: true });
    new ResizeObserver(redraw).observe(this.sight);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.sight.addEventListener("keydown", (event) => this.key(event));
    this.sight.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.magnify(event.deltaY < 0 ? 1.25 : 0.8, event.clientX - this.sight.getBoundingClientRect().left);
    }, { passive: false });
    for (const button of this.figure.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => this.magnify({ in: 2, out: 0.5, whole: 0 }[button.dataset.zoom]));
    }
  }

  // Pixels of the whole step, and how many of them are left of what is in sight.
  get width() { return this.sight.clientWidth * this.zoom; }
  get passed() { return this.sight.scrollLeft; }

  // `times` nearer, keeping the time at pixel `at` where it is; 0 times shows the whole step.
  magnify(times, at = this.sight.clientWidth / 2) {
    const fraction = (this.passed + at) / this.width;
    const most = Math.max(8, this.rows.reduce((sum, row) => Math.max(sum, row.length), 0) / 6);
    this.zoom = Math.min(Math.max(this.zoom * times, 1), most);
    this.spacer.style.width = 100 * this.zoom + "%";
    this.sight.scrollLeft = fraction * this.width - at;
    this.draw();
  }

  draw() {
    const width = this.sight.clientWidth, height = this.lane * this.rows.length + 20, sharp = devicePixelRatio || 1;
    if (!width) return;
    this.canvas.width = width * sharp;
    this.canvas.height = height * sharp;
    this.canvas.style.width = width + "px";
    this.canvas.style.height = height + "px";
    const pen = this.canvas.getContext("2d");
    pen.scale(sharp, sharp);
    const colours = this.colours();
    this.rows.forEach((row, rank) => this.drawRow(pen, row, rank, width, colours));
    this.drawAxis(pen, width, height, colours);
    if (this.chosen) this.outline(pen, colours);
  }

  colours() {
    const style = getComputedStyle(document.documentElement);
    const probe = this.figure.querySelector(".legend");
    const named = Object.fromEntries([...probe.querySelectorAll("i")].map((mark) => [mark.className, getComputedStyle(mark).color]));
    return {
      kinds: this.packed.kinds.map(([name]) => named["c-" + this.packed.names[name].replaceAll(" ", "-")]),
      ...Object.fromEntries(["idle", "ink", "soft", "number"].map((name) => [name, style.getPropertyValue("--" + name).trim()])),
    };
  }

  place(span) {
    const scale = this.width / this.packed.seconds;
    return [span[2] * scale - this.passed, this.packed.kinds[span[0]][2] * scale];
  }

  drawRow(pen, row, rank, width, colours) {
    const gap = this.lane > 20 ? 3 : 1, top = rank * this.lane + gap, high = this.lane - 2 * gap;
    pen.fillStyle = colours.idle;
    pen.fillRect(0, top, width, high);
    const mean = this.width / (row.length || 1);
    if (mean < THIN) this.drawMix(pen, row, top, high, width, Math.max(2 * mean, 2), colours);
    else this.drawActions(pen, row, top, high, width, colours);
  }

  drawActions(pen, row, top, high, width, colours) {
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = "11px system-ui, sans-serif";
    for (const span of row) {
      const [left, long] = this.place(span);
      if (left + long < 0 || left > width) continue;
      pen.fillStyle = colours.kinds[span[0]];
      pen.fillRect(left, top, Math.max(long - (long > 4 ? 1 : 0), 0.6), high);
      if (span[1] >= 0 && high > 12 && long > 9 + 7 * String(span[1]).length) {
        pen.fillStyle = colours.number;
        pen.fillText(span[1], left + long / 2, top + high / 2 + 0.5);
      }
    }
  }

  // Columns of `wide` pixels, each divided in its height as its time, and its neighbours', is divided among kinds of work.
  drawMix(pen, row, top, high, width, wide, colours) {
    const count = Math.ceil(width / wide), names = this.packed.names.length, shares = new Float32Array(count * names);
    const tone = [];
    for (const span of row) {
      const [left, long] = this.place(span), name = this.packed.kinds[span[0]][0];
      tone[name] = colours.kinds[span[0]];
      for (let bin = Math.max(Math.floor(left / wide), 0); bin < count && bin * wide < left + long; bin += 1) {
        shares[bin * names + name] += (Math.min(left + long, (bin + 1) * wide) - Math.max(left, bin * wide)) / wide;
      }
    }
    for (let bin = 0; bin < count; bin += 1) {
      let bottom = top + high;
      for (let name = 0; name < names; name += 1) {
        const at = bin * names + name, before = shares[bin ? at - names : at], after = shares[bin + 1 < count ? at + names : at];
        const tall = Math.min((before + 2 * shares[at] + after) / 4, 1) * high;
        if (!tall) continue;
        pen.fillStyle = tone[name];
        pen.fillRect(bin * wide, bottom - tall, wide + 0.5, tall);
        bottom -= tall;
      }
    }
  }

  drawAxis(pen, width, height, colours) {
    const seconds = this.packed.seconds, raw = (seconds / this.zoom) / Math.max(2, width / 150);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
    pen.fillStyle = colours.soft;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    const first = Math.ceil((this.passed / this.width) * seconds / step - 1e-9);
    for (let number = first; number * step <= seconds * 1.0001; number += 1) {
      const at = ((number * step) / seconds) * this.width - this.passed;
      if (at > width) break;
      pen.textAlign = at < 24 ? "left" : at > width - 24 ? "right" : "center";
      pen.fillText(number ? formatSeconds(number * step) : "0", at, height - 4);
    }
  }

  outline(pen, colours) {
    const [rank, index] = this.chosen, [left, long] = this.place(this.rows[rank][index]);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 2;
    pen.strokeRect(left, rank * this.lane + 1, Math.max(long, 3), this.lane - 2);
  }

  // The last action of lane `rank` that has begun at `time`; -1 before the first.
  begun(rank, time) {
    const row = this.rows[rank];
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row[middle][2] <= time) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  words(rank, index) {
    const [kind, microbatch, start] = this.rows[rank][index], [name, stage, seconds] = this.packed.kinds[kind];
    const of = microbatch >= 0 ? ` of microbatch ${microbatch}, stage ${stage}` : "";
    return `${this.rowName} ${rank}: ${this.packed.names[name]}${of}: ${formatSeconds(seconds)}, from ${start ? formatSeconds(start) : "0"}`;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect(), rank = Math.floor((event.clientY - box.top) / this.lane);
    const time = ((this.passed + event.clientX - box.left) / this.width) * this.packed.seconds;
    let said = "";
    if (rank < this.rows.length && rank >= 0) {
      const index = this.begun(rank, time);
      const busy = index >= 0 && this.rows[rank][index][2] + this.packed.kinds[this.rows[rank][index][0]][2] >= time;
      said = busy ? this.words(rank, index) : `${this.rowName} ${rank}: idle at ${formatSeconds(time)}`;
    }
    this.canvas.dataset.tip = said;
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const zooms = { "+": 2, "=": 2, "-": 0.5, 0: 0 };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in moves || event.key in zooms)) return;
    event.preventDefault();
    if (event.key in zooms) { this.magnify(zooms[event.key]); return; }
    const [down, along] = moves[event.key];
    if (!this.chosen) this.chosen = [0, 0];
    else if (along) this.chosen[1] = Math.min(Math.max(this.chosen[1] + along, 0), this.rows[this.chosen[0]].length - 1);
    else {
      const time = this.rows[this.chosen[0]][this.chosen[1]][2];
      const rank = Math.min(Math.max(this.chosen[0] + down, 0), this.rows.length - 1);
      this.chosen = [rank, Math.max(this.begun(rank, time), 0)];
    }
    const [left, long] = this.place(this.rows[this.chosen[0]][this.chosen[1]]);
    if (left < 0 || left + long > this.sight.clientWidth) this.sight.scrollLeft += left + long / 2 - this.sight.clientWidth / 2;
    this.said.textContent = this.words(...this.chosen);
    this.draw();
  }
}
