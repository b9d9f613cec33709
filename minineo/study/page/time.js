"use strict";
// The time line: on each path, a piece for each step, as long as the step took.

const LONGEST = Math.max(
  ...["cached", "naive"].map((path) => steps.reduce((sum, step) => sum + step.seconds[path], 0)),
);

// A length on the lanes; what is left of their width is room for the totals.
const alongLane = (seconds) => `calc(var(--room) * ${seconds / LONGEST})`;

function makeLanes() {
  for (const path of ["cached", "naive"]) {
    const track = element("div", { class: "track", "aria-hidden": "true" });
    for (const step of steps) {
      const piece = element("button", { type: "button", tabIndex: -1, class: "piece" });
      piece.classList.toggle("prefill", step.phase === "prefill");
      piece.style.width = alongLane(step.seconds[path]);
      piece.title = `step ${step.index}, ${step.phase}: ${milliseconds(step.seconds[path])}`;
      piece.onclick = () => {
        pause();
        show({ step: step.index });
      };
      if (path === "cached" && isFlagged(step.index)) piece.classList.add("flag");
      track.append(piece);
    }
    track.append(element("span", { class: "total" }));
    byId("lanes").append(
      element("div", { class: `lane ${path}`, id: `lane-${path}` }, element("b", {}, path), track),
    );
  }
  const axis = element("div", { class: "axis", "aria-hidden": "true" });
  const unit = niceUnit(LONGEST / 5);
  for (let tick = 0; tick <= LONGEST; tick += unit) {
    const mark = element("span", {}, `${Number((1000 * tick).toPrecision(3))} ms`);
    mark.style.left = alongLane(tick);
    axis.append(mark);
  }
  byId("lanes").append(axis);
}

function isFlagged(index) {
  return index === facts.found?.step || index === facts.fault?.wrong_step;
}

// The next larger of 1, 2, 5, 10, 20, ...
function niceUnit(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least);
}

function paintLanes() {
  const soFar = {};
  for (const path of ["cached", "naive"]) {
    const pieces = byId(`lane-${path}`).querySelectorAll(".piece");
    soFar[path] = 0;
    steps.forEach((step, index) => {
      pieces[index].classList.toggle("done", index <= state.step);
      pieces[index].classList.toggle("now", index === state.step);
      if (index <= state.step) soFar[path] += step.seconds[path];
    });
    const total = byId(`lane-${path}`).querySelector(".total");
    total.textContent = milliseconds(soFar[path]);
    total.style.left = alongLane(soFar[path]);
  }
  const { cached, naive } = steps[state.step].seconds;
  const ratio = soFar.naive / soFar.cached;
  byId("time-says").textContent =
    `This step: ${milliseconds(cached)} cached, ${milliseconds(naive)} naive. So far: ` +
    `${milliseconds(soFar.cached)} and ${milliseconds(soFar.naive)}, ${ratio.toFixed(1)} times as ` +
    "long without the cache. Measured in a run of its own, in which nothing was recorded.";
}

makeLanes();
painters.push(paintLanes);
