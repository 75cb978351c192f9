-- Which keys hold something of another type than they should, read and nothing written.
-- KEYS: KEY[]
-- ARGV: types[]
-- Returns {index from 0, what is wrong, index, what is wrong, ...}.
local wrong = {}
for i, key in ipairs(KEY) do
  local problem = problem_of(key, types[i])
  if problem then
    wrong[#wrong + 1] = i - 1
    wrong[#wrong + 1] = problem
  end
end
return wrong
