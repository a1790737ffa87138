// Loads files of the page, and tells the reader how far it is and what went wrong.

export const find = (id) => document.getElementById(id);

export function complain(message) {
  find("error").textContent = message;
  find("error").hidden = false;
}

/** The bytes of the engine or of a model's files, while a bar shows how much has arrived. The model's `sizes` are their
 * numbers of bytes: hosts that compress files do not tell. Raises an error that names the file that cannot be loaded. */
export async function loadFiles(names, { folder, sizes }) {
  const bar = find("loading");
  const total = names.reduce((sum, name) => sum + sizes[name], 0);
  Object.assign(bar, { hidden: false, max: total, value: 0 });
  try {
    return await Promise.all(names.map((name) => loadBytes(name.endsWith(".wasm") ? name : folder + name, (bytes) => (bar.value += bytes))));
  } finally {
    bar.hidden = true;
  }
}

export async function loadBytes(name, arrive = () => {}) {
  try {
    const response = await fetch(name);
    if (response.ok) {
      const parts = [];
      const reader = response.body.getReader();
      for (let part; !(part = await reader.read()).done; arrive(part.value.length)) parts.push(part.value);
      return new Uint8Array(await new Blob(parts).arrayBuffer());
    }
  } catch {
    // The server has stopped, perhaps in the middle of the file.
  }
  throw new Error(`The file ${name} cannot be loaded. Is the server still running?`);
}
