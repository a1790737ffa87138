// Loads the model, and switches between the views.

import { setUpDraw } from "./draw.js";
import { setUpInspect } from "./inspect.js";
import { complain, find, loadBytes, loadFiles } from "./load.js";
import { setUpRace } from "./race.js";
import { setUpSample } from "./sample.js";

/** The engine in its worker. It does one job at a time; messages of earlier jobs are dropped. */
class Engine {
  constructor() {
    this.worker = new Worker("worker.js", { type: "module" });
    this.worker.onerror = () => complain("The engine has stopped. Please reload the page.");
    this.worker.onmessage = ({ data: { id, ...message } }) => {
      if (id !== this.id) return;
      if (message.error) complain(message.error);
      else this.receive(message);
    };
    this.id = 0;
  }

  run(job, receive) {
    find("error").hidden = true;
    this.receive = receive;
    this.worker.postMessage({ id: ++this.id, ...job });
  }

  stop() {
    this.run({}, () => {});
  }
}

function setUpTabs(views) {
  const tabs = Object.keys(views).map((name) => find(`tab-${name}`));
  let open = null;
  function select(tab) {
    const name = tab.getAttribute("aria-controls");
    if (name === open) return;
    views[open]?.hide?.();
    open = name;
    for (const other of tabs) {
      other.setAttribute("aria-selected", other === tab);
      other.tabIndex = other === tab ? 0 : -1;
      find(other.getAttribute("aria-controls")).hidden = other !== tab;
    }
    history.replaceState(null, "", `#${name}`);
    views[name].show();
  }
  tabs.forEach((tab, n) => {
    tab.onclick = () => select(tab);
    tab.onkeydown = ({ key }) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
      if (!step) return;
      const next = tabs[(n + step + tabs.length) % tabs.length];
      next.focus();
      select(next);
    };
  });
  select(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
}

/** The list of all models. Choosing one loads the page again, with the same view. */
function listModels(names, place) {
  const list = find("model");
  list.append(...names.map((name, n) => new Option(name, n, n === place, n === place)));
  list.onchange = () => (location.search = `?model=${list.value}`);
  list.parentElement.hidden = names.length < 2;
}

function describe(model) {
  const millions = (model.parameters / 1e6).toFixed(1);
  find("about").textContent = `${model.name} · ${model.attention} attention · ${millions} million parameters · runs in this page`;
  document.title = `lintx · ${model.name}`;
  const size = (model.sizes["model.lintx"] / 1e6).toFixed(1);
  const quality = model.bits_per_dim === null ? "" : `${model.bits_per_dim.toFixed(3)} ${model.bits_unit} · `;
  find("facts").textContent = `${quality}int8 program of ${size} MB · weights ${model.weights_sha256.slice(0, 12)} · lintx ${model.version}`;
}

try {
  if (!globalThis.WebAssembly) throw new Error("This browser has no WebAssembly. A newer browser has it.");
  const place = Number(new URLSearchParams(location.search).get("model")) || 0;
  const folder = place ? `${place}/` : "";
  const model = JSON.parse(new TextDecoder().decode(await loadBytes(`${folder}model.json`)));
  model.folder = folder;
  find("about").textContent = `Loading ${model.name}`;
  listModels(model.models, place);
  const [wasm, program] = await loadFiles(["engine.wasm", "model.lintx"], model);
  describe(model);
  const engine = new Engine();
  engine.run({ job: "load", wasm, program }, (shape) => {
    const views = {};
    if (!model.text) views.draw = setUpDraw(engine, shape, model);
    if (!model.text) views.sample = setUpSample(engine, shape, model);
    views.inspect = setUpInspect(engine, shape, model);
    if (model.rival && !model.text) views.race = setUpRace(engine, shape, model);
    for (const name of ["draw", "sample", "race"].filter((name) => !views[name])) {
      find(`tab-${name}`).hidden = find(name).hidden = true;
    }
    document.body.dataset.ready = "yes";
    setUpTabs(views);
  });
} catch (error) {
  find("about").textContent = "";
  find("loading").hidden = true;
  complain(error.message);
}
