/* Where a page, or a program in node, keeps what it has learnt: bytes by name. */

const inMemory = () => {
  const kept = new Map();
  return {
    read: async (name) => kept.get(name) ?? null,
    write: async (name, bytes) => { kept.set(name, bytes.slice()); },
  };
};

async function inFolder(path) {
  const files = await import("node:fs/promises");
  await files.mkdir(path, {recursive: true});
  return {
    read: (name) => files.readFile(`${path}/${name}`).then((b) => new Uint8Array(b), () => null),
    write: async (name, bytes) => {
      const file = await files.open(`${path}/${name}.new`, "w");
      await file.writeFile(bytes);
      await file.sync();
      await file.close();
      await files.rename(`${path}/${name}.new`, `${path}/${name}`);
    },
  };
}

// A file changes when its stream is closed, all at once. One of no bytes was never closed.
async function inPrivateFiles(folder) {
  const root = await navigator.storage.getDirectory();
  const held = await root.getDirectoryHandle(folder, {create: true});
  const read = async (name) => {
    const file = await held.getFileHandle(name).then((handle) => handle.getFile(), () => null);
    return file?.size ? new Uint8Array(await file.arrayBuffer()) : null;
  };
  const write = async (name, bytes) => {
    const stream = await (await held.getFileHandle(name, {create: true})).createWritable();
    await stream.write(bytes);
    await stream.close();
  };
  await write("probe", new Uint8Array(1)); // some browsers have files that a page cannot write
  return {read, write};
}

const settled = (request, event = "onsuccess") => new Promise((resolve, reject) => {
  request[event] = () => resolve(request.result);
  request.onerror = request.onabort = () => reject(request.error);
});

async function inDatabase(name) {
  const opening = indexedDB.open(name, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("bytes");
  const database = await settled(opening);
  return {
    read: async (key) => {
      const bytes = database.transaction("bytes").objectStore("bytes").get(key);
      return (await settled(bytes)) ?? null;
    },
    write: async (key, bytes) => {
      const transaction = database.transaction("bytes", "readwrite");
      transaction.objectStore("bytes").put(bytes.slice(), key);
      await settled(transaction, "oncomplete");
    },
  };
}

/** {kind, why, read(name), write(name, bytes)} of a name of your own. read gives null where there
 * is nothing; a write that is cut off changes nothing. `kind` says where bytes are: in the
 * "private files" of the page's origin; where these are missing, in a "database" of the browser;
 * and without that in "memory", until the page is closed. `why` has what failed. In node bytes are
 * in a "folder" of that name. */
export async function openStore(name) {
  if (typeof process === "object") return {kind: "folder", why: "", ...(await inFolder(name))};
  const why = [];
  for (const [kind, open] of [["private files", inPrivateFiles], ["database", inDatabase]]) {
    try {
      return {kind, why: why.join("; "), ...(await open(name))};
    } catch (error) {
      why.push(`${kind}: ${error.message}`);
    }
  }
  return {kind: "memory", why: why.join("; "), ...inMemory()};
}
