package duemq.peer;

import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.Consumer;

/**
 * The clients that were used last, each open for the next use under the same name: the start of a client costs more than
 * most of its requests. Older ones are closed once nobody uses them.
 */
final class Recent<C> {
    private static final int KEPT = 4;

    /** Opens a client. */
    interface Opening<C> {
        C open() throws Exception;
    }

    private static final class Entry<C> {
        final C client;
        int users;

        Entry(C client) {
            this.client = client;
        }
    }

    private final Map<String, Entry<C>> entries = new LinkedHashMap<>(16, 0.75f, true);
    private final Consumer<C> closing;

    Recent(Consumer<C> closing) {
        this.closing = closing;
    }

    /** Returns the client of a name, opened if there is none; it stays open until it is given back. */
    synchronized C take(String name, Opening<C> opening) throws Exception {
        Entry<C> entry = entries.get(name);
        if (entry == null) {
            entry = new Entry<>(opening.open());
            entries.put(name, entry);
        }
        entry.users++;
        return entry.client;
    }

    /** Gives a client back. */
    synchronized void giveBack(String name) {
        entries.get(name).users--;
        Iterator<Entry<C>> oldest = entries.values().iterator();
        for (int tooMany = entries.size() - KEPT; tooMany > 0 && oldest.hasNext();) {
            Entry<C> entry = oldest.next();
            if (entry.users == 0) {
                oldest.remove();
                Thread thread = new Thread(() -> closing.accept(entry.client)); // it may take seconds
                thread.setDaemon(true);
                thread.start();
                tooMany--;
            }
        }
    }
}
