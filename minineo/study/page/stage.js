"use strict";
// What is looked at: a step, a layer, a head and a view. Everything is drawn from it.

const state = { step: 0, layer: 0, head: 0, view: "scores" };
const painters = []; // called with the state after every change
let playing = null;

const PACE = 700; // milliseconds that a step stays while playing
const VIEWS = ["scores", "pattern", "mix"];

function show(changes) {
  Object.assign(state, changes);
  state.step = clamp(state.step, steps.length);
  state.layer = clamp(state.layer, LAYERS);
  state.head = clamp(state.head, HEADS);
  for (const paint of painters) paint();
}

const clamp = (index, length) => Math.min(Math.max(index, 0), length - 1);

function move(by) {
  pause();
  show({ step: state.step + by });
}

function play() {
  if (state.step === steps.length - 1) show({ step: 0 });
  playing = setInterval(() => {
    show({ step: state.step + 1 });
    if (state.step === steps.length - 1) pause();
  }, PACE);
  paintStage();
}

function pause() {
  clearInterval(playing);
  playing = null;
  paintStage();
}

function stepName(index) {
  const step = steps[index];
  return `Step ${index} of ${steps.length - 1}: ${step.phase}`;
}

function paintStage() {
  byId("step").value = state.step;
  byId("step").setAttribute("aria-valuetext", stepName(state.step));
  byId("where").value = stepName(state.step);
  byId("layer").value = state.layer;
  byId("head").value = state.head;
  byId("back").disabled = state.step === 0;
  byId("next").disabled = state.step === steps.length - 1;
  byId("play").textContent = playing ? "Pause" : "Play";
  byId("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  for (const button of byId("views").children) {
    const chosen = button.dataset.view === state.view;
    button.setAttribute("aria-checked", chosen);
    button.tabIndex = chosen ? 0 : -1;
  }
  if (!playing) byId("announce").textContent = `${stepName(state.step)}. ${gist(state.step)}`;
}

// What happens in a step, in a sentence.
function gist(index) {
  const step = steps[index];
  const made = fed(step);
  if (step.start === 0) {
    return `Both paths make the queries, keys and values of all ${plural(step.end, "token")}.`;
  }
  return (
    `The cached path makes those of ${plural(made, "token")} and finds ${step.start} in its cache; ` +
    `the naive path makes all ${step.end} again.`
  );
}

// Theme

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
  byId("theme").setAttribute("aria-label", `Use ${theme === "dark" ? "light" : "dark"} colours`);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Keys

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const tag = event.target.tagName;
  if (tag === "SELECT" || tag === "CANVAS") return;
  if (event.target.closest(".scroll") && event.key.startsWith("Arrow")) return; // it scrolls
  if (tag === "INPUT" && /^(Arrow|Home|End|Page)/.test(event.key)) return pause();
  if (event.key === " " && /^(BUTTON|SUMMARY|A)$/.test(tag)) return;
  if (event.target.getAttribute("role") === "radio" && event.key.startsWith("Arrow")) {
    event.preventDefault();
    const by = /Right|Down/.test(event.key) ? 1 : -1;
    const next = VIEWS.at((VIEWS.indexOf(state.view) + by) % VIEWS.length);
    show({ view: next });
    byId("views").querySelector(`[data-view=${next}]`).focus();
    return;
  }
  const actions = {
    ArrowLeft: () => move(-1),
    ArrowRight: () => move(1),
    Home: () => move(-steps.length),
    End: () => move(steps.length),
    ArrowUp: () => show({ layer: state.layer - 1 }),
    ArrowDown: () => show({ layer: state.layer + 1 }),
    "[": () => show({ head: state.head - 1 }),
    "]": () => show({ head: state.head + 1 }),
    " ": () => (playing ? pause() : play()),
    1: () => show({ view: "scores" }),
    2: () => show({ view: "pattern" }),
    3: () => show({ view: "mix" }),
    Escape: () => endTour(),
  };
  if (!Object.hasOwn(actions, event.key)) return;
  event.preventDefault();
  actions[event.key]();
}

function setStage() {
  byId("step").max = steps.length - 1;
  facts.windows.forEach((window, layer) => {
    const kind = window < facts.context ? "local" : "global";
    byId("layer").append(element("option", { value: layer }, `layer ${layer}, ${kind}`));
  });
  for (let head = 0; head < HEADS; head++) {
    byId("head").append(element("option", { value: head }, `head ${head}`));
  }
  byId("step").oninput = (event) => {
    pause();
    show({ step: Number(event.target.value) });
  };
  byId("layer").onchange = (event) => show({ layer: Number(event.target.value) });
  byId("head").onchange = (event) => show({ head: Number(event.target.value) });
  byId("back").onclick = () => move(-1);
  byId("next").onclick = () => move(1);
  byId("play").onclick = () => (playing ? pause() : play());
  byId("views").onclick = (event) => {
    const { view } = event.target.dataset;
    if (view) show({ view });
  };
  byId("keys-open").onclick = () => {
    const keys = byId("keys");
    keys.hidden = !keys.hidden;
    byId("keys-open").setAttribute("aria-expanded", !keys.hidden);
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  const change = (theme) => {
    setTheme(theme);
    show({});
  };
  dark.onchange = () => change(dark.matches ? "dark" : "light");
  byId("theme").onclick = () =>
    change(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  document.addEventListener("keydown", pressed);
  let waiting = null;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => show({}), 60);
  });
}

setStage();
painters.push(paintStage);
